"""What the streams count, by metric name."""

from .curve import CurveServer
from .emitters.port import Emitter
from .streams import Streams


def tally(streams: Streams, emitter: Emitter, curve: CurveServer | None, now_s: float) -> dict[str, float]:
    """Counters (`_total`) and gauges of this moment. `now_s`: the clock that the streams were made with."""
    counts, replays, channels = streams.counts, streams.replays, streams.channels.values()
    values: dict[str, float] = {
        "windows_total": counts["windows"],
        "batches_total": counts["batches"],
        "blocks_total": counts["blocks"],
        "bytes_total": _sum(streams, "sent_bytes"),
        "dropped_total": counts["unsent"],
        "gaps_total": counts["jumps"],
        "lapses_total": counts["lapses"],
        "beats_total": counts["beats"],
        "resets_total": counts["resets"],
        "bind_failures_total": counts["bind_failures"],
        "malformed_total": replays.counts["malformed"] + _sum(streams, "malformed"),
        "floods_total": _sum(streams, "floods"),
        "replays_total": replays.counts["requests"],
        "replay_batches_total": replays.counts["batches"],
        "replay_refused_total": replays.counts["refused"],
        "replay_stalled_total": replays.counts["stalled"] + replays.counts["gone"],
        "replays_under_way": replays.under_way,
        "snapshots_total": replays.counts["snapshots"],
        "snapshots_made_total": streams.segments.made,
        "snapshots_cut_total": streams.segments.cut,
        "snapshot_bytes": streams.segments.size_bytes,
        "ring_windows": sum(len(state.ring) for state in streams.shards.values()),
        "ring_bytes": streams.ring_bytes,
        "tombstones": streams.announced.tombstone_count,
        "tombstones_forgotten_total": streams.announced.forgotten,
        "streams": len(channels),
        "streams_not_served": streams.beyond,
        "leading": sum(state.leads for state in streams.shards.values()),
        "lag_seconds": max((streams.lag_s(channel, now_s) for channel in channels), default=0.0),
    }
    for reason, count in emitter.invalid.items():
        values[f'invalid_total{{reason="{_quoted(reason)}"}}'] = count
    for instance in streams.announced.instances:
        values[f'announced{{instance="{_quoted(instance)}"}}'] = streams.announced.blocks(instance)
    for channel in channels:
        label = f'{{stream="{channel.channel}"}}'
        values["subscribers" + label] = channel.subscribers
    if curve is not None:
        values["admitted_total"], values["denied_total"] = curve.admitted, curve.refused
    return values


def _sum(streams: Streams, name: str) -> float:
    """Of all channels, those that are no more too."""
    return streams.retired[name] + sum(channel.counts[name] for channel in streams.channels.values())


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
