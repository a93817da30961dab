"""The README's tour, run as it stands there, against a real service: what it shows is what one sees."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(sh|python) tour\n(.*?)^```\n(?:\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Tour:
    """A folder with a service in it, and the README's commands pointed at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ready = folder / "ready.json"
        command = [sys.executable, "-m", "metaservice.main", "serve", "--data", str(folder / "ucm-data")]
        self.service = subprocess.Popen(
            [*command, "--port", "0", "--ready-file", str(ready)], stderr=subprocess.DEVNULL, cwd=ROOT
        )
        for _ in range(600):
            if ready.exists():
                break
            assert self.service.poll() is None, "the service ended"
            time.sleep(0.05)
        self.port = json.loads(ready.read_text())["port"]

    def run(self, language: str, text: str) -> str:
        """What the block prints."""
        text = text.replace("8600", str(self.port)).replace(".venv/bin/", f"{Path(sys.executable).parent}/")
        program = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
        done = subprocess.run(
            program,
            cwd=self.folder,
            env={
                "PYTHONPATH": str(ROOT),
                "PATH": "/usr/bin:/bin",
                "UCM_URL": f"http://127.0.0.1:{self.port}",
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def tour(tmp_path: Path) -> Iterator[Tour]:
    """A fresh service."""
    one = Tour(tmp_path)
    yield one
    one.service.terminate()
    assert one.service.wait(15) == 0


def test_the_tour_shows_what_it_says(tour: Tour) -> None:
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    assert [language for language, _, _ in blocks] == ["sh", "python", "sh"]
    names = blocks[0][1].splitlines()[0]  # the shell variables of the first block, as a terminal keeps them
    printed = ""
    for language, text, shown in blocks:
        printed = tour.run(language, f"{names}\n{text}" if language == "sh" else text)
        if shown:
            assert printed.strip() == shown.strip()
    assert '"switch":{"scope":"instance","id":"llama-8b","mode":"bypass"}' in printed
    assert "llama-8b" in printed
