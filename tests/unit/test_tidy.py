"""The style that the project keeps, enforced: what no linter's rule says but a reviewer would.

Each rule is a function from text to the offences in it, and is itself tested against a planted offence, so
that a rule which stopped finding anything would be seen.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import metaservice

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("metaservice", "dataplane", "engine_adapters")
BASE_ROOMS = ("metaservice/wire", "metaservice/client", "dataplane", "engine_adapters")
ENGINE_BRINGS = {
    "dataplane/staging.py": ["torch"],
    "engine_adapters/vllm/connector.py": ["torch", "vllm"],
    "engine_adapters/vllm/describe.py": ["torch", "vllm"],
    "engine_adapters/vllm/endpoints.py": ["vllm"],
    "engine_adapters/vllm/events.py": ["vllm"],
    "engine_adapters/vllm/pool.py": ["vllm"],
    "engine_adapters/vllm/pool_follower.py": ["pyzmq"],
    "engine_adapters/vllm/pool_secrets.py": ["pyzmq"],
    "engine_adapters/vllm/pool_stream.py": ["pyzmq"],
    "engine_adapters/vllm/prom.py": ["prometheus-client", "vllm"],
    "engine_adapters/vllm/spans.py": ["opentelemetry-api"],
    "engine_adapters/vllm/stats.py": ["vllm"],
}
"""The modules that know an engine, and what it brings along for them. All others decide without one, and are
tested without one."""
LINES_MAX = 500
TRACKED_SIZE_MAX_BYTES = 512 * 1024

Offences = Iterator[tuple[int, str]]
"""(line, what is wrong with it)"""


@cache
def project_files() -> tuple[Path, ...]:
    """Every file of the project, also those not committed yet, without what git ignores."""
    git = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(git, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        pytest.skip(f"not a git checkout that this user may read: {run.stderr.strip()}")
    return tuple(
        path for name in sorted(set(run.stdout.split("\0"))) if name and (path := ROOT / name).is_file()
    )


def modules(*rooms: str, but: tuple[str, ...] = ()) -> list[Path]:
    """The Python modules under `rooms`, without those under a path in `but`."""

    def within(path: Path, places: tuple[str, ...]) -> bool:
        name = path.relative_to(ROOT).as_posix()
        return any(name == place or name.startswith(place + "/") for place in places)

    return [
        path
        for path in project_files()
        if path.suffix == ".py" and within(path, rooms) and not within(path, but)
    ]


def offences(paths: list[Path], rule: Callable[[str], Offences]) -> list[str]:
    found = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        found += [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in rule(text)]
    return found


def imported(text: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in `text`, wherever it stands."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.lineno, node.module


# --- rules ---------------------------------------------------------------------------------------------

CLOCKS_AND_CHANCE = {"time", "random", "secrets"}
RANDOM_IDS = {"uuid1", "uuid4"}
NOW_CALLS = {
    "now",
    "utcnow",
    "today",
    "urandom",
    "getrandom",
    "monotonic",
    "monotonic_ns",
    "time_ns",
    "perf_counter",
}


def reads_clock_or_chance(text: str) -> Offences:
    """Time and chance are arguments: read anywhere else, a replay would not give the same state."""
    for line, name in imported(text):
        if name.split(".")[0] in CLOCKS_AND_CHANCE:
            yield line, f"imports {name}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            clock = node.func.attr in NOW_CALLS and owner.split(".")[0] in {"datetime", "date", "os", "dt"}
            if clock or node.func.attr in RANDOM_IDS:
                yield node.lineno, f"calls {owner}.{node.func.attr}"
            elif node.func.attr == "time" and "loop" in owner:
                yield node.lineno, f"calls {owner}.time"
        elif isinstance(node, ast.ImportFrom) and node.module in ("os", "uuid"):
            made = NOW_CALLS | RANDOM_IDS
            yield from (
                (node.lineno, f"imports {node.module}.{a.name}") for a in node.names if a.name in made
            )


def prints(text: str) -> Offences:
    """Only the command line talks to a terminal; elsewhere a print blocks the loop and nobody reads it."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "calls print"


MARKERS = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def unfinished(text: str) -> Offences:
    """What is not done is an issue, not a remark."""
    for number, line in enumerate(text.splitlines(), 1):
        if marker := MARKERS.search(line):
            yield number, f"says {marker[0]}"


ROOTS = "|".join(("wo" + "rk", "fa" + "rm", "ro" + "ot"))
SCRATCH = "tm" + "p/(?:venvs|research|bash_jobs)"
HOSTS = "|".join((r"py" + r"pi\.org", "python" + "hosted", r"registry\.npm" + "js", r"deb\.deb" + "ian"))
LEAKS = re.compile(rf"(?:^|[^A-Za-z0-9_.])/(?:{ROOTS})/|/{SCRATCH}|{HOSTS}")


def leaks(text: str) -> Offences:
    """A path of the author's machine or the host of a registry works nowhere else."""
    for number, line in enumerate(text.splitlines(), 1):
        if leak := LEAKS.search(line):
            yield number, f"names {leak[0].strip()}"


def too_long(text: str) -> Offences:
    """A module has one job."""
    if (lines := text.count("\n")) > LINES_MAX:
        yield lines, f"has {lines} lines, more than {LINES_MAX}"


def not_declared(text: str, requirements: list[str]) -> Offences:
    """What is only there because another package needs it is gone when that package changes its mind."""
    declared = {re.split(r"[<>=;\[ ]", spec)[0].replace("-", "_") for spec in requirements}
    declared |= {name.partition("_")[0] for name in declared if name.startswith("opentelemetry_")}
    declared |= {"zmq"} if "pyzmq" in declared else set()
    for line, name in imported(text):
        if name.split(".")[0] not in sys.stdlib_module_names | declared | set(PACKAGES):
            yield line, f"imports {name}"


def heavy_imports(text: str) -> Offences:
    """What runs beside a model imports the standard library, the base dependencies and its own rooms only."""
    return not_declared(text, project_table()["project"]["dependencies"])


def undeclared_imports(text: str) -> Offences:
    """What the server imports, its extra names."""
    project = project_table()["project"]
    return not_declared(text, project["dependencies"] + project["optional-dependencies"]["server"])


@cache
def project_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return table


@pytest.mark.parametrize(
    ("rule", "offending", "clean"),
    [
        (reads_clock_or_chance, "import time", "now_ms = clock.now_ms()"),
        (reads_clock_or_chance, "def f():\n    from random import choice", "from asyncio import sleep"),
        (reads_clock_or_chance, "import os\nos.urandom(8)", "import os\nos.fsync(3)"),
        (reads_clock_or_chance, "from os import urandom", "from os import fsync"),
        (
            reads_clock_or_chance,
            "import datetime\ndatetime.datetime.now()",
            "import datetime\ndatetime.timedelta(1)",
        ),
        (reads_clock_or_chance, "asyncio.get_running_loop().time()", "self.clock.time()"),
        (prints, "print('x')", "self.print('x')"),
        (unfinished, "x = 1  # TO" + "DO: later", "x = 1  # to do it later"),
        (leaks, "path = '/wo" + "rk/main'", "path = 'net" + "work/main'"),
        (leaks, "see https://py" + "pi.org", "see PyPI"),
        (too_long, "x = 1\n" * (LINES_MAX + 1), "x = 1\n" * LINES_MAX),
        (heavy_imports, "import fastapi", "import json, msgspec"),
        (
            heavy_imports,
            "try:\n    from numpy import array\nexcept ImportError: pass",
            "from metaservice import wire",
        ),
    ],
)
def test_each_rule_finds_its_planted_offence(
    rule: Callable[[str], Offences], offending: str, clean: str
) -> None:
    assert list(rule(offending))
    assert not list(rule(clean))


# --- the project keeps them ----------------------------------------------------------------------------


def test_only_the_edges_read_clocks_and_chance() -> None:
    edges = ("metaservice/clock.py", "metaservice/main.py", "metaservice/client", "metaservice/cli")
    found = offences(modules("metaservice", but=edges), reads_clock_or_chance)
    # How long the API waits for others decides nothing.
    assert [one for one in found if not re.match(r"metaservice/api/.*: calls loop.time$", one)] == []


def test_only_the_command_line_prints() -> None:
    assert offences(modules(*PACKAGES, but=("metaservice/cli",)), prints) == []


def test_nothing_is_marked_unfinished() -> None:
    assert offences(modules(*PACKAGES, "tests", "migrations"), unfinished) == []


def test_modules_are_short() -> None:
    assert offences(modules(*PACKAGES, "tests"), too_long) == []


def test_what_runs_in_an_engine_is_light() -> None:
    assert offences(modules(*BASE_ROOMS, but=tuple(ENGINE_BRINGS)), heavy_imports) == []


def test_what_knows_an_engine_imports_what_it_brings_along_and_no_more() -> None:
    base = project_table()["project"]["dependencies"]
    for name, brought in ENGINE_BRINGS.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert [f"{name}:{line}: {what}" for line, what in not_declared(text, base + brought)] == []


def test_what_the_packages_import_is_declared() -> None:
    assert offences(modules(*PACKAGES, but=tuple(ENGINE_BRINGS)), undeclared_imports) == []


def test_nothing_names_a_machine_or_a_registry() -> None:
    texts = [path for path in project_files() if b"\0" not in path.read_bytes()[:8192]]
    assert offences(texts, leaks) == []


def test_no_file_is_large() -> None:
    large = [
        str(path.relative_to(ROOT))
        for path in project_files()
        if path.stat().st_size > TRACKED_SIZE_MAX_BYTES
    ]
    assert large == []


def test_test_modules_have_names_of_their_own() -> None:
    names = Counter(path.name for path in modules("tests") if path.name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


# --- packaging -----------------------------------------------------------------------------------------


def test_every_room_stands_in_an_import_contract() -> None:
    """A room that no contract names could import whatever it likes."""
    contracts = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[tool.importlinter]")[2]
    listed = set(re.findall(r"[a-z_]+(?:\.[a-z_]+)*", contracts))
    rooms = {
        path.relative_to(ROOT).with_suffix("")
        for path in modules("metaservice")
        if path.parent == ROOT / "metaservice"
    }
    rooms |= {path.relative_to(ROOT).parent for path in modules("metaservice")}
    names = {room.as_posix().replace("/", ".") for room in rooms if len(room.parts) == 2} - {
        "metaservice.__init__"
    }
    assert len(names) > 7
    assert sorted(names - listed) == []


def locked(name: str) -> dict[str, list[str]]:
    """The requirements of a lock file: name -> its hashes."""
    text = (ROOT / "requirements" / name).read_text(encoding="utf-8")
    pins = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    return {
        re.split("==", pin)[0].split("[")[0]: re.findall(r"--hash=sha256:([0-9a-f]{64})", pin) for pin in pins
    }


def wanted(*specs: str) -> set[str]:
    return {re.split(r"[<>=;\[ ]", spec)[0].lower().replace("_", "-") for spec in specs}


def test_locks_hold_every_dependency_with_hashes_and_agree() -> None:
    table = project_table()
    base = wanted(*table["project"]["dependencies"])
    server = base | wanted(*table["project"]["optional-dependencies"]["server"])
    dev = server | wanted(*(spec for spec in table["dependency-groups"]["dev"] if isinstance(spec, str)))
    build = wanted(*table["dependency-groups"]["build"])
    cluster = wanted(*table["dependency-groups"]["cluster"])
    everything = locked("dev.lock")
    needs = {"base": base, "build": build, "server": server, "cluster": server | cluster}
    for name, needed in (needs | {"dev": dev | build | cluster}).items():
        pins = locked(f"{name}.lock")
        assert needed - pins.keys() == set(), f"{name}.lock is stale: make lock"
        assert [pin for pin, hashes in pins.items() if not hashes] == []
        assert [pin for pin, hashes in pins.items() if hashes != everything[pin]] == []
    assert locked("base.lock").keys() < locked("server.lock").keys() < locked("cluster.lock").keys()
    assert locked("cluster.lock").keys() < everything.keys()


# --- documents -----------------------------------------------------------------------------------------


def test_changelog_keeps_its_shape() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    releases = [line for line in lines if line.startswith("## ")]
    assert releases[0] == "## [Unreleased]"
    dated = [re.fullmatch(r"## \[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", line) for line in releases[1:]]
    assert None not in dated, f"a release reads '## [1.2.3] - 2026-01-31', not one of {releases[1:]}"
    order = [(tuple(map(int, release.groups()[:3])), release[4]) for release in dated if release]
    assert order == sorted(order, reverse=True), "the newest release stands first"
    kinds = {line for line in lines if line.startswith("### ")}
    allowed = {f"### {kind}" for kind in ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")}
    assert kinds <= allowed
    current = tuple(map(int, re.findall(r"\d+", metaservice.__version__)))
    assert not order or current >= order[0][0], "__version__ is older than the newest release"


def test_readme_figures_name_the_command_that_gives_them() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in re.split(r"^#+ ", text, flags=re.MULTILINE)}
    figures = {head: part for head, part in sections.items() if re.search(r"figure|measured", head.lower())}
    assert figures, "README has no section whose heading says that it holds figures"
    command = re.compile(r"(`|^)[^`\n]*\b(make [a-z]|ucm-meta [a-z]|python -m )", re.MULTILINE)
    assert [head for head, part in figures.items() if not command.search(part)] == []


def test_state_diagram_in_the_docs_is_the_generated_one() -> None:
    command = [sys.executable, "-m", "metaservice.core.diagram"]
    generated = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    written = (ROOT / "docs" / "states.md").read_text(encoding="utf-8")
    assert written == generated, "python -m metaservice.core.diagram > docs/states.md"
