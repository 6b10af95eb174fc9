"""Agreement: the calling threads of all ranks bring what they know, rank 0 decides, and all go on with its decision.

For ``open``, ``restore`` and ``close``, which every rank calls; never for a save. A rank that does not come, or comes
with something else, is named in the error that every other one gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tierfall.core import errors
from tierfall.core.bell import Bell
from tierfall.core.errors import RanksError, TierfallError
from tierfall.core.ranks.council import Bodies, Council, Topic
from tierfall.core.words import ranks_named

AGREE = "agree"
ANSWER_S = 5.0
_SLICE_S = 0.5


class Together:
    """One rank's part in agreements. ``lost`` is what keeps it from reaching the others, once that is known."""

    def __init__(self, council: Council, *, timeout_s: float) -> None:
        self._council = council
        self._timeout_s = timeout_s
        self._count = 0
        self._bells: dict[Topic, Bell] = {}
        self._gathered: dict[Topic, Bodies] = {}
        self._announced: dict[Topic, Any] = {}
        self.lost: BaseException | None = None

    def agree(
        self,
        what: str,
        body: Any,
        decide: Callable[[Bodies], Any],
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Return on every rank what ``decide`` makes, on rank 0, of what all have brought; ``what`` names the call.

        ``body`` and the decision are made of what JSON holds. Raises RanksError, on every rank that came, where one did
        not come within ``timeout_s`` or came from another call. What ``decide`` raises is raised everywhere: as it is
        on rank 0, as a new exception of its kind on the others (RanksError, where it is none of tierfall's).
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        topic: Topic = (AGREE, self._count)
        self._count += 1
        bell = self._bells[topic] = Bell()
        try:
            self._council.contribute(topic, [what, body])
            if self._council.topology.is_root:
                return self._decide(topic, what, decide, bell, timeout_s)
            # Rank 0 waits as long, and then says who did not come.
            if not self._wait(what, topic, bell, timeout_s + ANSWER_S):
                raise RanksError(
                    f"{what}: rank {self._rank}: rank 0 gave no answer within {timeout_s + ANSWER_S:g} s: it did not "
                    f"call {what}, or is gone"
                )
            answer = self._announced.pop(topic)
        finally:
            self._forget(topic)
        if "error" in answer:
            raise _kind(answer["kind"])(answer["error"])
        return answer["value"]

    @property
    def _rank(self) -> int:
        return self._council.topology.rank

    def take_gathered(self, topic: Topic, bodies: Bodies) -> None:
        self._gathered[topic] = bodies
        self._ring(topic)

    def take_announced(self, topic: Topic, body: Any) -> None:
        if topic in self._bells:
            self._announced[topic] = body
            self._ring(topic)

    def lose(self, error: BaseException) -> None:
        """Nobody can be reached any more: whoever waits is told."""
        self.lost = error
        for bell in list(self._bells.values()):
            bell.ring()

    def _ring(self, topic: Topic) -> None:
        bell = self._bells.get(topic)
        if bell is not None:
            bell.ring()

    def _forget(self, topic: Topic) -> None:
        self._council.forget(topic)
        kept: dict[Topic, Any]
        for kept in (self._bells, self._gathered, self._announced):
            kept.pop(topic, None)

    def _wait(self, what: str, topic: Topic, bell: Bell, timeout_s: float) -> bool:
        """Wait for the bell. Half-way, what came through this rank goes to rank 0, so that it can name who is late."""
        began = time.monotonic()
        handed_on = False
        while not bell.wait(_SLICE_S):
            passed = time.monotonic() - began
            if passed >= timeout_s:
                return False
            if passed >= timeout_s / 2 and not handed_on:
                handed_on = True
                self._council.hand_on_what_there_is(topic)
        if self.lost is not None and topic not in self._announced and topic not in self._gathered:
            raise RanksError(
                f"{what}: rank {self._rank}: the other ranks cannot be reached: {self.lost}"
            ) from self.lost
        return True

    def _decide(
        self,
        topic: Topic,
        what: str,
        decide: Callable[[Bodies], Any],
        bell: Bell,
        timeout_s: float,
    ) -> Any:
        try:
            if not self._wait(what, topic, bell, timeout_s):
                late = ranks_named(self._council.missing(topic))
                raise RanksError(f"{what}: {late} did not call {what} within {timeout_s:g} s")
            said = self._gathered.pop(topic)
            _check_same_call(what, {rank: call for rank, (call, _) in said.items()})
            value = decide({rank: body for rank, (_, body) in said.items()})
        except BaseException as error:
            self._council.announce(topic, {"error": str(error), "kind": type(error).__name__})
            raise
        self._council.announce(topic, {"value": value})
        return value


def _kind(name: str) -> type[TierfallError]:
    kind = getattr(errors, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, TierfallError) else RanksError


def _check_same_call(what: str, calls: dict[int, str]) -> None:
    others = {rank: call for rank, call in calls.items() if call != what}
    if others:
        rank, call = next(iter(others.items()))
        raise RanksError(
            f"{what}: {ranks_named(others)} called {call} where rank 0 called {what}: every rank makes the same calls "
            f"in the same order (rank {rank} is the first that does not)"
        )
