"""`ucm-meta cluster`: what the replicas of a cluster say of themselves, put together, and the planned
handover of a shard from one to another.

Every replica is asked, since each knows only its own roles for certain: whether a shard is led is what its
leader says, not what others remember of it.
"""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec.structs import replace
from rich.console import Console

from metaservice.cli.cluster_picture import ClusterStatus, joined
from metaservice.cli.cluster_screen import draw
from metaservice.client import Client, ClientConfig, ClientError
from metaservice.wire.schemas_cluster import ClusterReply

EXIT_DONE = 0
EXIT_NOT_DONE = 1
EXIT_UNREACHABLE = 2

REPLICAS_MAX = 64
"""So many are asked at most, whatever the replicas name."""
POLL_S = 0.05
SETTLE_S = 10.0
"""A successor that does not lead after so long has failed."""


# --- commands ------------------------------------------------------------------------------------------


def status(urls: Sequence[str], *, timeout_ms: int, as_json: bool) -> int:
    """Print the status to stdout. Exit status 0: every shard has a leader; 1: some shard has none; 2: no
    replica answers, which is said on stderr."""
    seen = collect(urls, timeout_ms)
    if seen is None:
        return EXIT_UNREACHABLE
    if as_json:
        print(msgspec.json.encode(seen).decode())
    else:
        draw(seen, Console())
    return EXIT_DONE if seen.led else EXIT_NOT_DONE


def handover(urls: Sequence[str], shard: int, to: str, *, timeout_ms: int) -> int:
    """Give the leadership of `shard` to the replica `to` (empty: whom its leader chooses), and wait until
    that one leads. Exit status 0: it does; 1: it could not be done; 2: no replica answers, or there is no
    such shard or replica."""
    seen = collect(urls, timeout_ms)
    if seen is None:
        return EXIT_UNREACHABLE
    wrong = _cannot(seen, shard, to)
    if wrong:
        return _fail(wrong, EXIT_UNREACHABLE)
    before = next(row for row in seen.shards if row.shard == shard)
    if not before.led:
        return _fail(f"shard {shard} has no leader that could hand it over: {before.note}", EXIT_NOT_DONE)
    if before.leader == to:
        print(f"shard {shard} is led by {to} already (epoch {before.epoch})")
        return EXIT_DONE
    started_s = time.monotonic()
    try:
        with Client(_config(before.leader_url, SETTLE_S * 1_000)) as client:
            told = client.post(f"/v1/cluster/shards/{shard}/handover", {"to": to})
    except (ClientError, ValueError) as error:
        return _fail(f"shard {shard} stays with {before.leader}: {error}", EXIT_NOT_DONE)
    successor = str(told["successor"])
    after = _led_by(successor, shard, seen, timeout_ms, until_s=started_s + SETTLE_S)
    if after is None:
        return _fail(
            f"{before.leader} gave up shard {shard}, and {successor} does not lead it after "
            f"{SETTLE_S:.0f} s; see ucm-meta cluster status",
            EXIT_NOT_DONE,
        )
    took_ms = (time.monotonic() - started_s) * 1_000
    was, now = f"{before.leader} (epoch {before.epoch})", f"{successor} (epoch {after})"
    print(f"shard {shard}: {was} -> {now} in {took_ms:.0f} ms")
    return EXIT_DONE


def _cannot(seen: ClusterStatus, shard: int, to: str) -> str:
    if shard not in {row.shard for row in seen.shards}:
        return f"there is no shard {shard}: they are 0 to {len(seen.shards) - 1}"
    answering = sorted(row.replica for row in seen.replicas if row.answers)
    if to and to not in answering:
        return f"no replica {to!r} answers: {', '.join(answering)} do"
    return ""


def _led_by(replica: str, shard: int, seen: ClusterStatus, timeout_ms: int, *, until_s: float) -> int | None:
    """The epoch in which `replica` leads `shard`, once it does; None when it does not in time."""
    url = next((row.url for row in seen.replicas if row.replica == replica), "")
    while url and time.monotonic() < until_s:
        said = _ask(url, timeout_ms)
        if isinstance(said, ClusterReply):
            row = next((row for row in said.shards if row.shard == shard), None)
            if row is not None and row.role == "leader" and row.ready:
                return row.epoch
        time.sleep(POLL_S)
    return None


def _fail(text: str, exit_status: int) -> int:
    sys.stderr.write(f"error: {text}\n")
    return exit_status


# --- asking --------------------------------------------------------------------------------------------


def collect(urls: Sequence[str], timeout_ms: int) -> ClusterStatus | None:
    """Ask the replicas at `urls`, and those that they name, at once. None when none answers, or when they
    are not of one cluster, which is said on stderr."""
    answers: dict[str, ClusterReply] = {}
    errors: dict[str, str] = {}
    named: dict[str, str] = {}
    asked: set[str] = set()
    next_urls = [*dict.fromkeys(urls)]
    with ThreadPoolExecutor(max_workers=REPLICAS_MAX) as pool:
        while next_urls and len(asked) < REPLICAS_MAX:
            asked.update(next_urls)
            for url, said in zip(
                next_urls, pool.map(_ask, next_urls, [timeout_ms] * len(next_urls)), strict=True
            ):
                if isinstance(said, ClusterReply):
                    answers.setdefault(said.replica, replace(said, url=url))
                    named |= {member.url: member.replica for member in said.members if member.url}
                else:
                    errors[url] = said
            next_urls = [
                url for url, replica in named.items() if replica not in answers and url not in asked
            ][: REPLICAS_MAX - len(asked)]
    if not answers:
        for url, error in errors.items():
            sys.stderr.write(f"error: no status from {url}: {error}\n")
        return None
    clusters = {said.cluster: replica for replica, said in answers.items() if said.cluster}
    if len(clusters) > 1:
        which = ", ".join(f"{replica} to {cluster}" for cluster, replica in sorted(clusters.items()))
        sys.stderr.write(f"error: these replicas are not of one cluster: {which}\n")
        return None
    silent = {url: error for url, error in errors.items() if named.get(url) not in answers}
    return joined([answers[replica] for replica in sorted(answers)], silent, named)


def _ask(url: str, timeout_ms: int) -> ClusterReply | str:
    """What the replica at `url` says, or why it says nothing."""
    try:
        with Client(_config(url, timeout_ms)) as client:
            return msgspec.convert(client.get_json("/v1/cluster"), ClusterReply)
    except (ClientError, ValueError) as error:
        return str(error)


def _config(url: str, timeout_ms: float) -> ClientConfig:
    return ClientConfig(
        url=url, timeout_ms=int(timeout_ms), admin_timeout_ms=int(timeout_ms), raise_errors=True
    )
