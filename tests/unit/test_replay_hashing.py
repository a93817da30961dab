"""Block keys are the same in every process, whatever its hash seed, and name the whole prefix."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_adapters.replay import hashing

ROOT = Path(__file__).resolve().parent.parent.parent

PROBE = """
from engine_adapters.replay import hashing
from engine_adapters.replay.requests import Request
from engine_adapters.replay.trace import Trace
from engine_adapters.replay.workload import Workload
import pathlib, sys
print(hashing.canary(block_size_tokens=16, seed="s"))
tokens = hashing.pack_tokens(range(1000))
print([key.hex() for key in hashing.chain(tokens, block_size_tokens=64, seed="s")])
for request in Workload(requests=14, seed=5):
    print(hashing.chain(request.tokens, block_size_tokens=512, seed="s")[-1].hex())
for request in Trace(pathlib.Path(sys.argv[1])):
    print([key.hex() for key in request.keys])
"""


def probe(trace: Path, python_hash_seed: str) -> str:
    """What a new process with that `PYTHONHASHSEED` computes for fixed inputs."""
    environment = {**os.environ, "PYTHONHASHSEED": python_hash_seed}
    command = [sys.executable, "-c", PROBE, str(trace)]
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert len(run.stdout.splitlines()) == 18
    return run.stdout


@pytest.fixture(scope="module")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [7, 8]}\n'
        '{"timestamp": 1, "input_length": 1500, "output_length": 1, "hash_ids": [7, 9, 8]}\n'
    )
    return path


def test_f1_two_processes_with_different_hash_seeds_give_the_same_keys(small_trace: Path) -> None:
    assert probe(small_trace, "1") == probe(small_trace, "4242")


def test_f2_two_processes_with_random_addresses_and_hash_seeds_give_the_same_keys(small_trace: Path) -> None:
    assert probe(small_trace, "random") == probe(small_trace, "random")


def test_keys_are_what_the_scheme_says() -> None:
    """Pinned: keys that change under the same scheme name would be misses in every cache that exists."""
    keys = hashing.chain(hashing.pack_tokens([1, 2, 3, 4]), block_size_tokens=2, seed="seed", key_length=16)
    assert [key.hex() for key in keys] == PINNED


PINNED = ["a2cee15f270fbad47867c75404fbe1df", "48d7a20f907240e33e7b20ea583d3c14"]


def test_a_key_names_its_whole_prefix() -> None:
    def keys(*tokens: int) -> list[bytes]:
        return hashing.chain(hashing.pack_tokens(tokens), block_size_tokens=2, seed="s")

    one = keys(1, 2, 3, 4, 5, 6)
    assert keys(1, 2, 3, 4) == one[:2]
    other = keys(9, 2, 3, 4, 5, 6)
    assert not set(one) & set(other), "another root gives other keys throughout"
    late = keys(1, 2, 3, 4, 5, 7)
    assert late[:2] == one[:2] and late[2] != one[2]
    repeated = keys(1, 2, 1, 2, 1, 2)
    assert len(set(repeated)) == 3, "equal tokens at different places are different blocks"


def test_f5_a_tail_that_fills_no_block_has_no_key() -> None:
    def count(tokens: int) -> int:
        return len(hashing.chain(hashing.pack_tokens(range(tokens)), block_size_tokens=16, seed="s"))

    assert [count(n) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 1, 1, 1, 2]


def test_seed_and_key_length_make_other_keys() -> None:
    tokens = hashing.pack_tokens(range(16))
    one = hashing.chain(tokens, block_size_tokens=16, seed="a")
    assert hashing.chain(tokens, block_size_tokens=16, seed="b") != one
    for length in (16, 20, 32, 64):
        (key,) = hashing.chain(tokens, block_size_tokens=16, seed="a", key_length=length)
        assert len(key) == length
    short = hashing.chain(tokens, block_size_tokens=16, seed="a", key_length=16)
    assert not one[0].startswith(short[0])


@pytest.mark.parametrize(
    ("tokens", "block_size_tokens", "key_length", "says"),
    [
        (b"\0" * 64, 0, 32, "block_size_tokens"),
        (b"\0" * 64, 16, 15, "key_length"),
        (b"\0" * 64, 16, 65, "key_length"),
        (b"\0" * 63, 16, 32, "whole number"),
    ],
)
def test_bad_arguments_are_named(tokens: bytes, block_size_tokens: int, key_length: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hashing.chain(tokens, block_size_tokens=block_size_tokens, seed="s", key_length=key_length)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_tokens_out_of_range_are_refused(token: int) -> None:
    with pytest.raises(ValueError, match="token ids"):
        hashing.pack_tokens([token])


def test_canary_tells_ways_of_hashing_apart() -> None:
    canaries = {
        hashing.canary(block_size_tokens=size, seed=seed, key_length=length)
        for size in (16, 64, 2048)
        for seed in ("a", "b")
        for length in (16, 32)
    }
    assert len(canaries) == 12
