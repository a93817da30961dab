"""Several places that give the same answer: which is asked next, and when one that failed is asked again."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from metaservice.leadership.errors import LeadershipUnavailable

T = TypeVar("T")

REST_FIRST_S = 0.05
"""How long a place is left alone after its first failure; doubled with each further one."""


class PlaceFailed(Exception):
    """This place gave no answer; another one may."""


@dataclass(slots=True)
class _Place:
    name: str
    failures: int = 0
    rests_until_s: float = 0.0


class Rota:
    """Asks the place that answered last; on any failure another one, each at most once a call.

    A place that hangs costs one timeout, once: it is asked again only when the others fail too. A place that
    failed rests before its next attempt, for a time that grows and is drawn anew each time, so that the
    replicas of a fleet that lost the same server do not come back in step (case C9). The rest stays below one
    timeout: a lease of at least four timeouts outlives several of them.
    """

    def __init__(
        self,
        where: str,
        names: Sequence[str],
        timeout_ms: int,
        now_s: Callable[[], float],
        chance: Callable[[], float],
    ) -> None:
        """`where` is what messages call the whole; `chance` returns numbers from 0 up to 1."""
        assert names
        self.where = where
        self._timeout_s = timeout_ms / 1000
        self._now_s = now_s
        self._chance = chance
        first = int(chance() * len(names))
        self._places = [_Place(name) for name in names]
        self._order = [(first + step) % len(names) for step in range(len(names))]

    async def ask(self, doing: str, attempt: Callable[[int], Awaitable[T]]) -> T:
        """The result of `attempt(index)` at the first place where it does not raise PlaceFailed or run out of
        time. Any other exception is an answer too, and passed on.

        Ends within two timeouts. Raises LeadershipUnavailable, whose reason says what each place did.
        """
        end_s = self._now_s() + 2 * self._timeout_s
        reasons: list[str] = []
        for index in self._next():
            place = self._places[index]
            now_s = self._now_s()
            rest_s = max(place.rests_until_s - now_s, 0.0)
            budget_s = min(self._timeout_s, end_s - now_s - rest_s)
            if budget_s <= 0:
                break
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            try:
                async with asyncio.timeout(budget_s):
                    result = await attempt(index)
            except TimeoutError:
                reasons.append(f"{place.name}: no answer within {budget_s * 1000:.0f} ms")
            except PlaceFailed as error:
                reasons.append(f"{place.name}: {error}")
            except Exception:
                self._answered(index)
                raise
            else:
                self._answered(index)
                return result
            self._failed(index)
        raise LeadershipUnavailable(self.where, doing, "; ".join(reasons) or "its turn came too late")

    def _next(self) -> Sequence[int]:
        """Those that need no rest any more first, the last one that answered before all."""
        now_s = self._now_s()
        return sorted(self._order, key=lambda index: max(self._places[index].rests_until_s - now_s, 0.0))

    def _answered(self, index: int) -> None:
        self._places[index].failures = 0
        self._places[index].rests_until_s = 0.0
        self._order.remove(index)
        self._order.insert(0, index)

    def _failed(self, index: int) -> None:
        place = self._places[index]
        rest_s = min(REST_FIRST_S * 2**place.failures, self._timeout_s / 2)
        place.failures = min(place.failures + 1, 16)
        place.rests_until_s = self._now_s() + rest_s * (0.5 + self._chance())
        self._order.remove(index)
        self._order.append(index)
