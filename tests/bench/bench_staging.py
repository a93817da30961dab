"""GB/s of pages between an engine's memory and host buffers, beside one contiguous copy of the same bytes.

    python tests/bench/bench_staging.py [--device cpu] [--total-mib 256] [--repeats 7] [--threads 1]

Needs torch, of whichever engine. `contiguous` is torch's copy_ of all the bytes at once: what memory gives.
The ways take turns within each repeat; the table has the median, and the best in brackets. Pages lie at
random in the engine's memory, each layer in a region of its own.
"""

import argparse
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from dataplane.staging import TorchPages

SHAPES = {
    "61 x 18 KiB": (61, 1, 16, 1152),
    "61 x 4 KiB": (61, 1, 16, 256),
    "32 x 64 KiB": (32, 8, 16, 512),
    "80 x 8 KiB (one of 8 ranks)": (80, 1, 16, 512),
}
"""Layers, heads, tokens, content bytes."""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--device", default="cpu")
    options.add_argument("--total-mib", type=int, default=256)
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--threads", type=int, default=1, help="torch's, for the contiguous copy")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {args.device}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'layers x page of a layer':<30}{'page':>10}{'contiguous':>16}{'gather':>16}{'scatter':>16}")
    for name, shape in SHAPES.items():
        page, ways = _ways(shape, args.device, args.total_mib << 20)
        rates: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way, (run, size_bytes) in ways.items():
                began = time.perf_counter()
                run()
                rates[way].append(size_bytes / (time.perf_counter() - began) / 1e9)
        cells = "".join(f"{median(found):>8.1f} ({max(found):4.1f}) " for found in rates.values())
        print(f"{name:<30}{page >> 10:>6} KiB {cells}")


def _ways(
    shape: tuple[int, int, int, int], device: str, total_bytes: int
) -> tuple[int, dict[str, tuple[Callable[[], object], int]]]:
    layers, heads, tokens, content = shape
    page = layers * heads * tokens * content
    blocks = max(4, total_bytes // page)
    memory = torch.zeros((layers, blocks, heads, tokens, content), dtype=torch.uint8, device=device).random_()
    pages = TorchPages(
        {f"layers.{n}": memory[n] for n in range(layers)}, [[f"layers.{n}" for n in range(layers)]], blocks
    )
    order = random.Random(1).sample(range(blocks), blocks // 2)
    outs = [pages.allocate(page) for _ in order]
    moved = page * len(order)
    source = torch.ones(moved, dtype=torch.uint8, device=device)
    target = torch.frombuffer(pages.allocate(moved), dtype=torch.uint8)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "contiguous": (lambda: target.copy_(source), moved),
        "gather": (lambda: pages.gather_many(0, order, outs), moved),
        "scatter": (lambda: pages.scatter_many(0, order, outs), moved),
    }
    for run, _ in ways.values():
        run()  # once before the clock runs: fresh memory is slow
    return page, ways


if __name__ == "__main__":
    main()
