"""Real processes that play an engine: the demo knows what they did, also when killed in the middle."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from engine_adapters.replay.children import ChildFailed, Children
from engine_adapters.replay.engine_handle import EngineDied, EngineHandle
from engine_adapters.replay.messages import Phase
from engine_adapters.replay.requests import Request

SAY = """
import json, sys, time
def say(**message):
    print(json.dumps(message), flush=True)
say(type="ready", incarnation="i")
for line in sys.stdin:
    index = json.loads(line)["index"]
    say(type="phase", index=index, step="writing", blocks=9)
"""
ANSWERS = SAY + '    say(type="done", index=index, asked=5, hits=3)\n'
HANGS_IN_THE_WRITE = SAY + "    time.sleep(60)\n"
HANGS_AFTER_IT = SAY + '    say(type="phase", index=index, step="finishing", blocks=9)\n    time.sleep(60)\n'
CUT_OFF = SAY + '    sys.stdout.write(\'{"type": "don\'); sys.stdout.flush(); sys.exit(3)\n'
NEVER_READY = "import sys; print('no model', file=sys.stderr); sys.exit(4)"

REQUEST = Request(index=7, session="s", tokens_count=3, tokens=b"\x01\x00\x00\x00" * 3)


async def until(happened: Callable[[], bool]) -> None:
    while not happened():
        await asyncio.sleep(0.01)


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    async with Children(tmp_path) as started:
        yield started


async def engine(children: Children, program: str, phases: list[Phase]) -> EngineHandle:
    child = await children.start("engine", [sys.executable, "-c", program], pipes=True)
    handle = EngineHandle("engine", child, lambda _, phase: phases.append(phase))
    await handle.ready()
    return handle


async def test_answers_one_request_after_another(children: Children) -> None:
    phases: list[Phase] = []
    handle = await engine(children, ANSWERS, phases)
    for _ in range(3):
        done = await handle.serve(REQUEST)
        assert (done.index, done.asked, done.hits) == (7, 5, 3)
        assert handle.job_index is None
    assert [phase.step for phase in phases] == ["writing"] * 3
    await handle.close()
    assert not handle.child.running


@pytest.mark.parametrize(
    ("program", "step"), [(HANGS_IN_THE_WRITE, "writing"), (HANGS_AFTER_IT, "finishing")]
)
async def test_a_kill_shows_in_which_step_it_came(children: Children, program: str, step: str) -> None:
    handle = await engine(children, program, [])
    serving = asyncio.create_task(handle.serve(REQUEST))
    await until(lambda: handle.step == step)
    handle.child.kill()
    with pytest.raises(EngineDied):
        await serving
    await handle.gone()
    assert (handle.job_index, handle.step) == (7, step)
    assert handle.child.process.returncode == -9
    with pytest.raises(EngineDied):
        await handle.serve(REQUEST)


async def test_an_answer_cut_off_is_no_answer(children: Children) -> None:
    handle = await engine(children, CUT_OFF, [])
    with pytest.raises(EngineDied):
        await handle.serve(REQUEST)


async def test_one_that_does_not_start_shows_its_log(children: Children) -> None:
    with pytest.raises(ChildFailed, match=r"ended before it was ready(.|\n)*no model"):
        await engine(children, NEVER_READY, [])


async def test_leaving_ends_every_child_also_one_that_will_not(tmp_path: Path) -> None:
    stubborn = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n"
    stubborn += "time.sleep(60)"
    async with Children(tmp_path) as started:
        child = await started.start("stubborn", [sys.executable, "-c", stubborn])
        other = await started.start("other", [sys.executable, "-c", "import time; time.sleep(60)"])
        await until(lambda: "up" in child.log.read_text())
        child.stop_grace_s = 0.2
    assert child.process.returncode == -9
    assert other.process.returncode == -15
