"""The model that the scores of real indexers are compared with, on cases that were tried on one by hand."""

import random

import pytest

from tests.compat.reference import (
    DEVICE,
    DISK,
    HASH_LOWEST,
    HOST,
    SHARED,
    Author,
    Document,
    Mismatch,
    Reach,
    Truth,
    event_hash,
    mismatches,
)

BLOCK = 4


@pytest.fixture
def author() -> Author:
    return Author(random.Random(7), BLOCK)


def reach(document: Document, **tiers: set[int]) -> Reach:
    """What a worker has, by the numbers of blocks."""
    names = {"device": DEVICE, "host": HOST, "disk": DISK, "shared": SHARED}
    return Reach({names[tier]: {document.keys[at] for at in blocks} for tier, blocks in tiers.items()})


@pytest.mark.parametrize(
    ("tiers", "score"),
    [
        ({}, (0, 0, 0)),
        ({"device": {0, 1}}, (8, 8, 8)),
        ({"device": {1}}, (0, 0, 0)),
        ({"device": {0, 1}, "shared": {0, 1, 2}}, (8, 8, 12)),
        ({"shared": {0, 1, 2}}, (0, 0, 12)),
        ({"device": {0}, "host": {1}, "disk": {2}, "shared": {3}}, (4, 8, 16)),
        # what only the shared storage has ends the walk through nearer tiers
        ({"device": {0, 1}, "shared": {2}, "host": {3}}, (8, 8, 12)),
        # a hole that another tier fills is none; one that nobody fills is
        ({"device": {0, 2}, "shared": {1, 2}}, (4, 4, 12)),
        ({"device": {0}, "shared": {0, 2}}, (4, 4, 4)),
    ],
)
def test_a_prompt_is_walked_tier_after_tier(
    author: Author, tiers: dict[str, set[int]], score: tuple[int, int, int]
) -> None:
    document = author.write(5)
    assert reach(document, **tiers).score(document.keys, 5, BLOCK) == score


def test_what_is_stored_behind_a_gap_is_not_announced(author: Author) -> None:
    truth = Truth(BLOCK)
    worker = truth.join(1, "node")
    document = author.write(4)
    truth.at_node("node", HOST).add(document.keys[0])
    truth.shared.update(document.keys[1:])
    assert truth.board(document) == {1: (0, 4, 16)}
    truth.drop([document.keys[1]])
    assert truth.board(document) == {1: (0, 4, 4)}
    worker.keys(DEVICE).update(document.keys[:2])
    assert truth.board(document) == {1: (8, 8, 8)}, "the blocks behind the gap are told to nobody"


def test_a_block_of_one_node_behind_one_of_another_is_told_to_nobody(author: Author) -> None:
    truth = Truth(BLOCK)
    for worker, node in ((1, "a"), (2, "b")):
        truth.join(worker, node)
    document = author.write(4)
    truth.at_node("a", HOST).add(document.keys[0])
    truth.at_node("b", HOST).add(document.keys[1])
    truth.shared.update(document.keys[2:])
    assert truth.announced(document.keys) == 1
    assert truth.board(document) == {1: (0, 4, 4)}
    truth.drop([document.keys[0]])
    truth.shared.add(document.keys[0])
    assert truth.announced(document.keys) == 4
    assert truth.board(document) == {1: (0, 0, 4), 2: (0, 0, 4)}, "nearer tiers come first, and only once"


def test_workers_share_what_their_node_and_what_all_have(author: Author) -> None:
    truth = Truth(BLOCK)
    for worker, node in ((1, "a"), (2, "a"), (3, "b"), (4, "")):
        truth.join(worker, node)
    document = author.write(3)
    truth.at_node("a", HOST).update(document.keys)
    truth.shared.add(document.keys[0])
    assert truth.board(document) == {1: (0, 12, 12), 2: (0, 12, 12), 3: (0, 0, 4), 4: (0, 0, 4)}
    truth.leave(1)
    assert 1 not in truth.board(document)
    truth.drop(document.keys)
    assert truth.board(document) == {}


def test_documents_of_a_family_share_their_beginning_and_retold_ones_no_key(author: Author) -> None:
    one, two = author.family(2, 3, 2)
    assert one.keys[:3] == two.keys[:3]
    assert not set(one.keys[3:]) & set(two.keys[3:])
    told = author.retold(one, lora="adapter")
    assert told.prompt == one.prompt
    assert not set(told.keys) & set(one.keys)
    assert one.upto(3) == two.upto(3)
    assert all(hash >= HASH_LOWEST for hash in one.hashes)
    assert event_hash(bytes(24) + (2**40 + 1).to_bytes(8, "big")) == 2**40 + 1


def test_boards_that_differ_are_told_worker_by_worker() -> None:
    wanted = {1: (4, 4, 8), 2: (0, 0, 4)}
    found = {1: (4, 4, 8), 3: (4, 4, 4)}
    assert list(mismatches(wanted, wanted)) == []
    assert list(mismatches(wanted, found)) == [
        Mismatch(2, (0, 0, 4), (0, 0, 0)),
        Mismatch(3, (0, 0, 0), (4, 4, 4)),
    ]
