"""Batches: rows keep their order, one bad row is one bad answer, and threads are there after a fork too."""

import os
import threading

import pytest

from dataplane.batch import Batch, kept


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 31, 32, 33, 1_000])
def test_results_are_in_the_order_of_rows(threads: int, rows: int) -> None:
    batch = Batch(threads, "test")
    assert batch.run(lambda a, b: (a, b), range(rows), range(rows, 2 * rows)) == [
        (row, rows + row) for row in range(rows)
    ]
    batch.close()


def test_work_is_spread_over_the_threads() -> None:
    batch = Batch(3, "spread")
    together = threading.Barrier(3, timeout=10)
    batch.run(lambda _: together.wait(), range(3))  # breaks, and fails, unless three rows run at once
    batch.close()


def test_a_kept_error_is_the_answer_of_its_row_and_another_error_ends_the_batch() -> None:
    batch = Batch(2, "test")
    divide = kept(lambda row: 10 // row, ZeroDivisionError)
    results = batch.run(divide, [1, 2, 0, 5])
    assert [results[at] for at in (0, 1, 3)] == [10, 5, 2]
    assert isinstance(results[2], ZeroDivisionError)
    with pytest.raises(TypeError):
        batch.run(divide, [1, 2, "text", 5])
    batch.close()


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        Batch(2, "test").run(lambda a, b: None, [1, 2], [1])


def test_a_forked_child_has_threads_of_its_own() -> None:
    batch = Batch(2, "test")
    batch.run(abs, range(100))
    child = os.fork()
    if child == 0:
        os._exit(0 if batch.run(abs, range(-100, 0)) == list(range(100, 0, -1)) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    batch.close()
