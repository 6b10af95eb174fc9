"""Agreement: the calling threads of all ranks bring what they know, rank 0 decides, and all go on with its decision.

For ``open``, ``restore`` and ``close``, which every rank calls; never for a save. A rank that does not come, or comes
with something else, is named in the error that every other one gets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tierfall.core.ranks.message_tree import Bodies, MessageTree, Topic
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import RanksError, error_class
from tierfall.core.types.text import ranks_named

AGREE = "agree"
ANSWER_S = 5.0
"""Rank 0 waits for the others, and the others so much longer for what it says of those that did not come."""


class Agreement:
    """One rank's part in agreements. ``lost`` is what keeps it from reaching the others, once that is known."""

    def __init__(self, council: MessageTree, *, timeout_s: float) -> None:
        self._council = council
        self._timeout_s = timeout_s
        self._count = 0
        self._bells: dict[Topic, InterruptibleEvent] = {}
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

        ``body`` and the decision are made of what JSON holds, and come back as JSON gives them. Raises RanksError, on
        every rank that came, where one did not come within ``timeout_s`` or came from another call. What ``decide``
        raises is raised everywhere: as it is on rank 0, as a new exception of its kind on the others (RanksError, where
        it is none of tierfall's).
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        topic: Topic = (AGREE, self._count)
        try:
            bell = self._bells[topic] = InterruptibleEvent()
            self._count += 1
            if self.lost is not None or topic in self._announced:  # before this rank came
                bell.ring()
            self._council.contribute(topic, [what, body])
            if self._council.topology.is_root:
                return self._decide(topic, what, decide, bell, timeout_s)
            if not self._wait(what, topic, bell, timeout_s + ANSWER_S):
                raise RanksError(
                    f"{what}: rank {self._rank}: rank 0 gave no answer within {timeout_s + ANSWER_S:g} s: it did not "
                    f"call {what}, or is gone"
                )
            answer = self._announced.pop(topic)
        finally:
            self._forget(topic)
        if "error" in answer:
            raise error_class(answer["kind"], RanksError)(answer["error"])
        return answer["value"]

    @property
    def _rank(self) -> int:
        return self._council.topology.rank

    def take_gathered(self, topic: Topic, bodies: Bodies) -> None:
        self._gathered[topic] = bodies
        self._notify(topic)

    def take_announced(self, topic: Topic, body: Any) -> None:
        """Keep an answer for the call that waits for it, or that this rank has still to make: it comes too late then,
        and is told so at once."""
        if topic in self._bells or topic[1] >= self._count:  # type: ignore[operator]
            self._announced[topic] = body
            self._notify(topic)

    def lose(self, error: BaseException) -> None:
        """Nobody can be reached any more: whoever waits is told."""
        self.lost = error
        for bell in list(self._bells.values()):
            bell.ring()

    def _notify(self, topic: Topic) -> None:
        bell = self._bells.get(topic)
        if bell is not None:
            bell.ring()

    def _forget(self, topic: Topic) -> None:
        self._council.forget(topic)
        kept: dict[Topic, Any]
        for kept in (self._bells, self._gathered, self._announced):
            kept.pop(topic, None)

    def _wait(self, what: str, topic: Topic, bell: InterruptibleEvent, timeout_s: float) -> bool:
        """Wait for the bell. Half-way, rank 0 has handed on to it what there is, so that it can name who is late."""
        if not bell.wait(timeout_s / 2):
            if self._council.topology.is_root:
                self._council.hand_on_what_there_is(topic)
            if not bell.wait(timeout_s / 2):
                return False
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
        bell: InterruptibleEvent,
        timeout_s: float,
    ) -> Any:
        try:
            if not self._wait(what, topic, bell, timeout_s):
                late = self._council.missing(topic)
                if late or not bell.wait(ANSWER_S):  # none is late: the last came this moment
                    raise RanksError(
                        f"{what}: {ranks_named(late)} did not call {what} within {timeout_s:g} s"
                    )
            said = self._gathered.pop(topic)
            _check_same_call(what, {rank: call for rank, (call, _) in said.items()})
            decision = decide({rank: body for rank, (_, body) in said.items()})
            value = json.loads(json.dumps(decision))  # the same on every rank, or an error now
        except BaseException as error:
            self._council.announce(topic, _error_to_json(what, error))
            raise
        self._council.announce(topic, {"value": value})
        return value


def _error_to_json(what: str, error: BaseException) -> dict[str, str]:
    """What the others are told of an error: its kind is the nearest that stands in ``errors``."""
    for kind in type(error).__mro__:
        if error_class(kind.__name__, RanksError) is kind:
            return {"error": str(error), "kind": kind.__name__}
    return {"error": f"{what}: rank 0 failed: {error!r}", "kind": RanksError.__name__}


def _check_same_call(what: str, calls: dict[int, str]) -> None:
    other = next((call for call in calls.values() if call != what), None)
    if other is not None:
        ranks = [rank for rank, call in calls.items() if call == other]
        raise RanksError(
            f"{what}: {ranks_named(ranks)} called {other} where rank 0 called {what}: every rank makes the same calls "
            "in the same order"
        )
