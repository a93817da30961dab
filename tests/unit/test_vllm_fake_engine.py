"""The judge is judged: the fake engine gives the right tokens alone, and shows every wrong byte."""

import random

import pytest

from tests.engines.engine_request import Status
from tests.engines.fake_engine import FakeEngine, often
from tests.engines.fake_scheduler import Options
from tests.engines.oracle import EngineBroken, Shape, answer, block_keys, compute, new_memory, true_pages
from tests.engines.plans import KvOutput, StepOutput, StepPlan

SHAPES = [Shape(), Shape(ranks=2), Shape(windows=(0, 8)), Shape(windows=(0, 7), ranks=2), Shape(windows=(9,))]


def _tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(251) for _ in range(count)]


@pytest.mark.parametrize("seed", range(25))
def test_alone_it_gives_the_tokens_of_a_machine_without_any_cache(seed: int) -> None:
    """Chunks, decoding, its own prefix cache, preemption, aborts and two steps under way change nothing."""
    chance = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    options = Options(
        blocks=chance.choice([24, 40, 80]) * len(shape.windows),
        budget_tokens=chance.choice([8, 16, 32]),
        depth=chance.choice([1, 2]),
        reserve_whole=chance.random() < 0.5,
        chunk_tokens=chance.choice([0, 8]),
    )
    engine = FakeEngine(shape, options, lazy=often(seed, 0.5))
    documents = [_tokens(chance, 30) for _ in range(3)]
    right = {}
    for number in range(12):
        prompt = chance.choice(documents)[: chance.randrange(1, 30)] + _tokens(chance, chance.randrange(1, 8))
        count = chance.randrange(1, 12)
        engine.add(str(number), prompt, count)
        right[str(number)] = answer(shape, tuple(prompt), count)
        for _ in range(chance.randrange(6)):
            if engine.busy:
                engine.step()
        if chance.random() < 0.2:
            engine.abort(str(chance.randrange(number + 1)), within_step=chance.random() < 0.5)
    engine.run()
    engine.check_idle()
    for name, outcome in engine.outcomes.items():
        outputs = right[name]
        if outcome.status != Status.stopped:
            outputs = outputs[: len(outcome.outputs)]
        assert outcome.outputs == outputs, f"seed {seed}, request {name}"


def test_it_preempts_when_its_memory_is_full() -> None:
    engine = FakeEngine(Shape(), Options(blocks=13, budget_tokens=64, reserve_whole=False))
    for name in "abc":
        engine.add(name, [ord(name)] * 10, 20)
    engine.run()
    engine.check_idle()
    assert engine.scheduler.preemptions > 0
    assert all(engine.outcomes[name].outputs == answer(Shape(), (ord(name),) * 10, 20) for name in "abc")


@pytest.mark.parametrize("shape", SHAPES)
def test_one_wrong_byte_in_any_page_that_is_read_changes_the_output(shape: Shape) -> None:
    """The oracle is sensitive: to every block in reach, on every rank and in every group."""
    prompt = tuple(range(30))
    blocks = 8
    right = answer(shape, prompt, 6)
    tables = [range(1 + group * blocks, 1 + (group + 1) * blocks) for group in shape.groups]
    size = shape.page_bytes
    for rank in range(shape.ranks):
        for group, window in enumerate(shape.windows):
            for block in range(0 if window == 0 else (27 - window) // 4 + 1, 6):
                memory = new_memory(shape, 1 + blocks * len(shape.windows) + 4)
                compute(shape, memory, tables, prompt, 0, 28)
                memory[rank][tables[group][block] * size + size - 1] ^= 1
                tokens, done = list(prompt), 24 if window else 28
                rows = [
                    [*row, *range(1 + blocks * len(shape.windows), 5 + blocks * len(shape.windows))]
                    for row in tables
                ]
                for _ in range(6):
                    token = compute(shape, memory, rows, tokens, done, len(tokens))
                    done = len(tokens)
                    tokens.append(token)
                assert tuple(tokens[30:]) != right, (rank, group, block)


def test_keys_differ_by_tokens_prefix_salt_and_adapter() -> None:
    shape = Shape()
    tokens = list(range(12))
    keys = block_keys(shape, tokens)
    assert keys[:2] == block_keys(shape, tokens[:11])
    for other in (
        block_keys(shape, [9, *tokens[1:]]),
        block_keys(shape, tokens, salt="s"),
        block_keys(shape, tokens, adapter="a"),
    ):
        assert not set(keys) & set(other)
    assert block_keys(shape, tokens, start=4, parent=keys[0]) == keys[1:]


def test_true_pages_are_what_an_engine_computes() -> None:
    shape = Shape(windows=(0, 6), ranks=2)
    engine = FakeEngine(shape)
    request = engine.add("r", range(21), 1)
    engine.step()
    size = shape.page_bytes
    for index, parts in enumerate(true_pages(shape, tuple(range(20)))):
        for number, page in enumerate(parts):
            rank, group = divmod(number, 2)
            block = engine.scheduler.tables.pool.cached(request.block_hashes[index], group)
            assert block is not None
            assert engine.runner.memory[rank][block.id * size : (block.id + 1) * size] == page


def _output(plan: StepPlan, kv: KvOutput) -> StepOutput:
    return StepOutput(dict.fromkeys(plan.scheduled, 0), kv)


@pytest.mark.parametrize(
    "kv",
    [
        KvOutput(finished_recving={"ghost"}),
        KvOutput(finished_sending={"ghost"}),
        KvOutput(finished_recving={"r"}),
        KvOutput(finished_sending={"r"}),
    ],
)
def test_row18_it_crashes_as_vllm_does_on_reports_nobody_waits_for(kv: KvOutput) -> None:
    engine = FakeEngine(Shape())
    engine.add("r", range(9), 4)
    plan = engine.scheduler.schedule()
    with pytest.raises(EngineBroken):
        engine.scheduler.update(plan, _output(plan, kv))


def test_it_crashes_as_vllm_does_on_block_numbers_with_several_groups() -> None:
    engine = FakeEngine(Shape(windows=(0, 8)))
    engine.add("r", range(9), 4)
    plan = engine.scheduler.schedule()
    with pytest.raises(EngineBroken):
        engine.scheduler.update(plan, _output(plan, KvOutput(invalid_blocks={3})))


def test_it_notices_leaked_blocks() -> None:
    engine = FakeEngine(Shape())
    engine.scheduler.tables.pool.take(1)
    with pytest.raises(EngineBroken, match="leaked"):
        engine.check_idle()
