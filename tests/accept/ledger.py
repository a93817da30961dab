"""What the acceptance measures, and whether it is good enough."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median, quantiles

from msgspec import Struct

from tests.accept.fleet import Row

HIT_RATE_STEADY_MIN = 0.5
"""A cache that never hits cannot fall."""
HIT_RATE_DROP_MAX = 0.15
ADDED_STEP_P99_MS_MAX = 1.0
LOOKUPS_PER_REQUEST_MAX = 2.0
REQUESTS_MIN = 150


class Figures(Struct, frozen=True, kw_only=True):
    """The last line. Rates are shares of 1."""

    requests: int
    wrong_outputs: int
    hit_rate_steady: float
    hit_rate_after_engine_kill: float
    hit_rate_after_leader_kill: float
    hit_rate_drop_max: float
    dirty_reads: int
    engine_errors: int
    oracle_sensitive: bool
    added_step_p99_ms: float
    ttft_cold_p50_ms: float
    ttft_hit_p50_ms: float
    lookups_per_request: float
    leases_left: int


Verdict = tuple[bool, str]
"""What a run had to show: whether it did, and a sentence."""


def hit_rate(rows: Iterable[Row]) -> float:
    """Blocks loaded / blocks that an infinite cache would have had beyond what the engine itself still had.

    The share of what was possible, since a cache fills up: later requests hit more than earlier ones whatever
    happens meanwhile. It could be a little above 1, where a request found what one handed out after it had
    written already; that is all that was possible.
    """
    loaded = possible = 0
    for row in rows:
        loaded += row.loaded
        possible += row.possible - row.local
    return min(1.0, loaded / possible) if possible > 0 else 0.0


def wrong(rows: Iterable[Row], baseline: Mapping[str, Sequence[int]]) -> list[Row]:
    """Rows whose tokens are not the baseline's."""
    return [row for row in rows if list(row.answer.tokens) != list(baseline[row.request.id])]


def p99(samples: Sequence[float]) -> float:
    """Of at least two samples; 0 of fewer."""
    return quantiles(samples, n=100, method="inclusive")[98] if len(samples) > 1 else 0.0


def p50(samples: Sequence[float]) -> float:
    """The median; 0 of none."""
    return median(samples) if samples else 0.0


def verdicts(figures: Figures) -> list[Verdict]:
    """What the figures had to be."""
    drop, step = figures.hit_rate_drop_max, figures.added_step_p99_ms
    cold, hit = figures.ttft_cold_p50_ms, figures.ttft_hit_p50_ms
    return [
        (figures.oracle_sensitive, "corrupted KV changes the output of every prompt"),
        (figures.requests >= REQUESTS_MIN, f"{figures.requests} requests ({REQUESTS_MIN} or more)"),
        (figures.wrong_outputs == 0, f"{figures.wrong_outputs} wrong outputs (0 allowed)"),
        (figures.dirty_reads == 0, f"{figures.dirty_reads} dirty reads (0 allowed)"),
        (figures.engine_errors == 0, f"{figures.engine_errors} engine errors (0 allowed)"),
        (
            figures.hit_rate_steady >= HIT_RATE_STEADY_MIN,
            f"hit rate {figures.hit_rate_steady:.3f} before anything was killed (at least "
            f"{HIT_RATE_STEADY_MIN:g})",
        ),
        (drop < HIT_RATE_DROP_MAX, f"hit rate fell by {drop:.3f} at most (less than {HIT_RATE_DROP_MAX})"),
        (
            step < ADDED_STEP_P99_MS_MAX,
            f"{step:.3f} ms added to a step at p99 (less than {ADDED_STEP_P99_MS_MAX:g})",
        ),
        (
            figures.lookups_per_request <= LOOKUPS_PER_REQUEST_MAX,
            f"{figures.lookups_per_request:.2f} lookups a request (at most {LOOKUPS_PER_REQUEST_MAX:g})",
        ),
        (0 < hit < cold, f"first token after {hit:.0f} ms with a hit, {cold:.0f} ms without"),
        (figures.leases_left == 0, f"{figures.leases_left} leases left (0 allowed)"),
    ]
