"""Draws the picture of a cluster as tables."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from metaservice.cli.cluster_picture import ClusterStatus, FollowerStatus, ReplicaStatus, ShardStatus

UNKNOWN_MS = 10**12
"""A replica that has not read the journal yet says that it is older than anything."""


def draw(seen: ClusterStatus, console: Console) -> None:
    """For people: replicas, shards, and what is wrong."""
    console.print(f"cluster {seen.cluster or '(not known yet)'}", highlight=False, markup=False)
    console.print(_replicas(seen.replicas))
    console.print(_shards(seen.shards))
    for replica in seen.replicas:
        name = replica.replica or replica.url
        if not replica.answers:
            _say(console, f"{name} does not answer: {replica.error}")
        elif replica.reason and not replica.ready:
            _say(console, f"{name} is not ready: {replica.reason}")
        if replica.answers and not replica.journal_ok:
            _say(console, f"{name} does not reach the journal")
    for shard in seen.shards:
        if shard.note:
            _say(console, f"shard {shard.shard}: {shard.note}")


def _say(console: Console, text: str) -> None:
    # Not broken to the width of the terminal: an operator copies these lines.
    console.print(f"[bold red]![/] {escape(text)}", highlight=False, soft_wrap=True)


def _replicas(replicas: list[ReplicaStatus]) -> Table:
    table = _table("replicas", "replica", "url", "status", "leads")
    for title in ("behind", "stale ms"):
        table.add_column(title, justify="right")
    for one in replicas:
        if one.answers:
            status = escape(one.status) if one.ready else f"[red]{escape(one.status)}[/]"
            leads = ", ".join(map(str, one.leads)) or "-"
            table.add_row(
                escape(one.replica),
                escape(one.url),
                status,
                leads,
                f"{one.lag_max:,}",
                _stale(one.staleness_ms_max),
            )
        else:
            table.add_row(
                escape(one.replica or "?"), escape(one.url), "[bold red]no answer[/]", "?", "?", "?"
            )
    return table


def _shards(shards: list[ShardStatus]) -> Table:
    table = _table("shards", "shard", "leader")
    for title in ("epoch", "seq", "lease left ms"):
        table.add_column(title, justify="right")
    table.add_column("followers (behind, stale ms)", overflow="fold")
    for one in shards:
        followers = [_follower(row) for row in one.followers]
        leader = escape(one.leader) if one.led else f"[bold red]none[/]{_hearsay(one)}"
        left = f"{one.lease_left_ms:,}" if one.led and one.lease_left_ms else "-"
        table.add_row(
            str(one.shard), leader, str(one.epoch), f"{one.seq:,}", left, escape(", ".join(followers)) or "-"
        )
    return table


def _follower(row: FollowerStatus) -> str:
    role = "" if row.role == "follower" else f", {row.role}"
    return f"{row.replica} ({row.lag:,}, {_stale(row.staleness_ms)}{role})"


def _stale(staleness_ms: int) -> str:
    return f"{staleness_ms:,}" if staleness_ms < UNKNOWN_MS else "?"


def _hearsay(shard: ShardStatus) -> str:
    return f" ({escape(shard.leader)}?)" if shard.leader else ""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
