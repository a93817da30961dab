"""What every case is given, and how one is told apart from others."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.compat.site import Site


@dataclass(slots=True)
class Stage:
    """One run. `entries`: blocks of the case that is about many of them."""

    site: Site
    chance: random.Random
    note: Callable[[str], None]
    entries: int
    recoveries_s: list[float] = field(default_factory=list)
    """How long after a new lease the scores were exact again, one a failover."""


Case = Callable[[Stage], str]
"""Does something to the service and its consumers; says in a few words what was seen. Raises CaseFailed."""
