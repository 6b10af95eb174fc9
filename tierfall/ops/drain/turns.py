"""In which order a drain of several ranks' memory brings what is owed, one copy at a time: by the plan of a drain, with
the rates that the copies before have shown."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from tierfall.config import Config
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.scheduler.ledger.throughput import Throughput
from tierfall.core.types.values import CheckpointId
from tierfall.core.types.view import DrainDecision
from tierfall.ops.commands import unread, view_of
from tierfall.policies.drain import plan_drain
from tierfall.session.drain_forecast import ForecastLog

Copy = tuple[CheckpointId, str]


class DrainOrder:
    """See the module. Without a deadline (``ends_s``, of the monotonic clock) the order stays as it is; ``tell`` is
    given the forecast."""

    def __init__(
        self,
        config: Config,
        listings: Sequence[Listing],
        ends_s: float | None,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config
        self._listings = listings
        self._ends_s = ends_s
        self._forecast = ForecastLog(tell)
        self._brought: defaultdict[str, Throughput] = defaultdict(Throughput)

    def note(self, tier: str, count: int, seconds: float) -> None:
        """So many bytes have come to a tier in so many seconds."""
        self._brought[tier].note(count, seconds)

    def turns(self, planned: Sequence[Copy]) -> Iterator[Copy]:
        """Give what is planned, each when it is its turn; what cannot arrive in time is left out."""
        if self._ends_s is None:
            yield from planned
            return
        waiting = set(planned)
        first = True
        while waiting:
            plan = self._plan(waiting, self._ends_s - time.monotonic())
            self._forecast.say(plan, first=first)
            first = False
            chosen = next((d for d in plan if d.goes), None)
            if chosen is None:
                return
            waiting.remove((chosen.checkpoint, chosen.tier))
            yield chosen.checkpoint, chosen.tier

    def _plan(self, waiting: Collection[Copy], left_s: float) -> tuple[DrainDecision, ...]:
        view = view_of(self._config, merge(self._listings))
        return plan_drain(
            replace(
                view,
                checkpoints=tuple(
                    replace(c, owed=frozenset(tier for id, tier in waiting if id == c.id))
                    for c in view.checkpoints
                ),
                failing=frozenset(unread(self._listings)),
            ),
            bytes_per_s={tier: brought.per_s for tier, brought in self._brought.items()},
            left_s=left_s,
            one_at_a_time=True,
        )
