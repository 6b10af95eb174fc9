"""Agreement: each rank's calling thread contributes a message, rank 0 decides, and all ranks return its decision.

For calls of all ranks, as ``open``, ``restore`` and ``close``; never for a save. An error names each rank that did not
make the call in time, or made another one.

Calls are numbered: the next one has the number after the last that rank 0 has answered, on every rank. A rank takes
back what it gives up. So a call that only some ranks make does not put later ones out of step. If rank 0 already had
that part, and another call of rank 0 failed by it, this rank's later call of that name fails, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tierfall.core.ranks.message_tree import (
    Bodies,
    DecisionAnnounced,
    MessagesGathered,
    MessageTree,
    RankMessage,
)
from tierfall.core.ranks.messages import ErrorMessage, Message, Topic, from_json, to_json
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.types.errors import RanksError, TierfallError
from tierfall.core.types.text import format_ranks

AGREE = "agree"
LOOK_S = 1.0
"""Seconds after which a wait looks again whether a rank is gone."""
ANSWER_S = 5.0
"""The other ranks wait this much longer than rank 0 does, for the error that names the ranks that did not come."""

M = TypeVar("M")
D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankCall(Message):
    """What one rank contributes: the name of the call that it makes, and its message, or the ``error`` that keeps it
    from making the call."""

    name: str
    body: object = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer(Message):
    """The answer to rank 0's call of that ``name``. ``without`` are the ranks whose part rank 0 did not have when it
    gave the call up."""

    name: str
    error: ErrorMessage | None = None
    without: tuple[int, ...] = ()
    decision: object = None


class LeftError(RanksError):
    """This rank has left an agreement by its ``leave``."""


class Agreement:
    """One rank's part in the agreements of one ``name``: one thread of each rank makes them. ``lost`` is the error that
    cut it off from the other ranks, if one did."""

    def __init__(self, message_tree: MessageTree, *, timeout_s: float, name: str = AGREE) -> None:
        self.name = name
        self._message_tree = message_tree
        self._timeout_s = timeout_s
        self._count = 0
        self._lock = threading.Lock()
        self._events: dict[Topic, InterruptibleEvent] = {}
        self._gathered: dict[Topic, Bodies] = {}
        self._answers: dict[Topic, _Answer] = {}
        self.lost: BaseException | None = None
        self.gone_s: Callable[[], float | None] = lambda: None
        """Returns since when, on the monotonic clock, a rank is known to be gone; None if none is."""

    def agree(
        self,
        what: str,
        message: M,
        decide: Callable[[dict[int, M]], D],
        answer: type[D],
        *,
        timeout_s: float | None = None,
        is_last: bool = False,
        leave: InterruptibleEvent | None = None,
        error: str = "",
    ) -> D:
        """Return, on every rank, what ``decide`` returns on rank 0 for the messages of all ranks.

        ``timeout_s`` is that of ``__init__`` if it is None, or once a rank is known to be gone.

        ``what`` names the call. All ranks contribute messages of one type; ``answer`` is the type of the decision.
        ``is_last``: a rank that gives this up makes no other call, and its message counts. Once ``leave`` is set, this
        rank has contributed, and waits no longer: LeftError. With an ``error`` this rank fails the call on all ranks.

        Raises RanksError on every rank that made the call where another one did not within ``timeout_s``, or made a
        call of another name. An error of ``decide`` is raised on all ranks: on rank 0 as it is, on the others as a new
        error of its kind (RanksError if it is none of tierfall's).
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            if self._message_tree.topology.is_root:
                part = _RankCall(name=what, error=error).to_json()
                with self._next_call(what, part, leave) as (topic, event):
                    return self._decide(topic, what, message, decide, event, timeout_s)
            part = _RankCall(name=what, body=to_json(message), error=error).to_json()
            decision = self._ask(what, part, timeout_s, leave, withdraws=not is_last)
            return from_json(answer, decision, rank=0)
        except TierfallError as failure:
            failure.known_to_all = True
            raise

    @contextmanager
    def _next_call(
        self, what: str, part: object, leave: InterruptibleEvent | None
    ) -> Iterator[tuple[Topic, InterruptibleEvent]]:
        """Contribute this rank's part to the next call; give its topic, and the event of its end, or ``leave``. Raises
        the error of that call if rank 0 has made it already, with a part that this rank took back too late."""
        with self._lock:
            missed = [
                answer.error
                for answer in self._answers.values()
                if answer.name == what and answer.error and self._rank not in answer.without
            ]
            self._answers.clear()
            topic: Topic = (self.name, self._count)
            event = leave or InterruptibleEvent()
            if not missed:
                self._events[topic] = event
        if missed:
            raise missed[-1].error()
        try:
            if self.lost is not None:
                event.set()
            self._message_tree.contribute(topic, part)
            yield topic, event
        finally:
            self._events.pop(topic, None)
            self._gathered.pop(topic, None)
            self._answers.pop(topic, None)

    def _ask(
        self,
        what: str,
        part: object,
        timeout_s: float,
        leave: InterruptibleEvent | None,
        *,
        withdraws: bool,
    ) -> object:
        """Contribute this rank's part, and return the decision of rank 0. The answer to an earlier call, which rank 0
        gave up without this rank or this rank gave up, is passed over: this call is the next one."""
        began_s = time.monotonic()
        while True:
            with self._next_call(what, part, leave) as (topic, event):
                try:
                    if not self._wait(what, topic, event, began_s, timeout_s):
                        bound_s = self._bound_s(began_s, timeout_s)
                        raise RanksError(
                            f"{what}: rank {self._rank}: rank 0 gave no answer within {bound_s:.6g} s: it did not "
                            f"call {what}, or is gone"
                        )
                except BaseException:
                    if withdraws:
                        self._message_tree.withdraw(topic)
                    raise
                found = self._answers[topic]
            if self._rank in found.without:
                continue
            if found.error is not None:
                raise found.error.error()
            if found.name == what:
                return found.decision

    def meet(
        self,
        what: str,
        *,
        timeout_s: float | None = None,
        is_last: bool = False,
        error: str = "",
    ) -> None:
        """Wait until every rank has made this call; raises as ``agree`` does."""
        self.agree(
            what,
            None,
            lambda bodies: None,
            object,
            timeout_s=timeout_s,
            is_last=is_last,
            error=error,
        )

    @property
    def _rank(self) -> int:
        return self._message_tree.topology.rank

    def on_message(self, message: RankMessage) -> None:
        """Keep what all ranks have contributed, at rank 0, or an answer, for the call that waits for it; an answer also
        for the next call, whose number follows."""
        topic = message.topic
        match message:
            case MessagesGathered(passed=False):
                self._gathered[topic] = message.bodies
            case DecisionAnnounced():
                with self._lock:
                    self._count = max(self._count, int(topic[1]) + 1)
                    self._answers[topic] = _Answer.from_json(message.body, rank=0)
                self._message_tree.forget(topic)
            case _:
                return
        if (event := self._events.get(topic)) is not None:
            event.set()

    def fail_waiting(self, error: BaseException) -> None:
        """Fail the calls that wait: no rank can be reached any more."""
        self.lost = error
        for event in list(self._events.values()):
            event.set()

    def _bound_s(self, began_s: float, timeout_s: float) -> float:
        """Return how long a call that began then may wait."""
        gone_s = self.gone_s()
        if gone_s is not None:
            timeout_s = min(timeout_s, max(0.0, gone_s - began_s) + self._timeout_s)
        return timeout_s if self._message_tree.topology.is_root else timeout_s + ANSWER_S

    def _wait(
        self,
        what: str,
        topic: Topic,
        event: InterruptibleEvent,
        began_s: float,
        timeout_s: float,
    ) -> bool:
        """Wait for the event; return False at the timeout. After half of it rank 0 has the contributions of complete
        and incomplete nodes forwarded, so that it can name the ranks that are late."""
        flushes = self._message_tree.topology.is_root
        while not event.is_set:
            bound_s, waited_s = self._bound_s(began_s, timeout_s), time.monotonic() - began_s
            if waited_s >= bound_s:
                return False
            if flushes and waited_s >= bound_s / 2:
                self._message_tree.flush_partial(topic)
                flushes = False
            event.wait(min(LOOK_S, (bound_s / 2 if flushes else bound_s) - waited_s))
        if topic not in self._answers and topic not in self._gathered:
            of = f"{what}: rank {self._rank}: the other ranks"
            if self.lost is None:
                raise LeftError(f"{of} are not waited for")
            raise RanksError(f"{of} cannot be reached: {self.lost}") from self.lost
        return True

    def _decide(
        self,
        topic: Topic,
        what: str,
        own: M,
        decide: Callable[[dict[int, M]], D],
        event: InterruptibleEvent,
        timeout_s: float,
    ) -> D:
        """Gather, with rank 0's ``own`` message, decide, announce the decision and return it."""
        gave_up = self._message_tree.was_withdrawn(topic)
        try:
            began_s = time.monotonic()
            if not self._wait(what, topic, event, began_s, timeout_s):
                late = self._message_tree.missing(topic)
                if late or not event.wait(ANSWER_S):  # no rank is late: the last came just now
                    raise RanksError(
                        f"{what}: {format_ranks(late)} did not call {what} within "
                        f"{self._bound_s(began_s, timeout_s):.6g} s"
                        f"{', or gave it up before rank 0 called it' if gave_up else ''}"
                    )
            bodies = self._gathered.pop(topic)
            calls = {rank: _RankCall.from_json(body, rank=rank) for rank, body in bodies.items()}
            _check_same_call(what, {rank: call.name for rank, call in calls.items()})
            for rank, call in calls.items():
                if call.error:
                    raise RanksError(f"{what.partition(':')[0]}: rank {rank}: {call.error}")
            messages = {
                rank: from_json(type(own), call.body, rank=rank) if rank else own
                for rank, call in calls.items()
            }
            decision = decide(messages)
            body = to_json(decision)
        except BaseException as error:
            without = self._message_tree.missing(topic)
            answer = _Answer(name=what, error=_error_for_others(what, error), without=without)
            self._message_tree.announce(topic, answer.to_json())
            raise
        self._message_tree.announce(topic, _Answer(name=what, decision=body).to_json())
        return decision


def _error_for_others(what: str, error: BaseException) -> ErrorMessage:
    found = ErrorMessage.of(error)
    if isinstance(error, TierfallError):
        return found
    return ErrorMessage(kind=found.kind, text=f"{what}: rank 0 failed: {found.text}")


def _check_same_call(what: str, calls: dict[int, str]) -> None:
    other = next((call for call in calls.values() if call != what), None)
    if other is not None:
        ranks = [rank for rank, call in calls.items() if call == other]
        raise RanksError(
            f"{what}: {format_ranks(ranks)} called {other} where rank 0 called {what}: every rank makes the same calls "
            "in the same order. The next call that all of them make works"
        )


def check_same_arguments(what: str, by_rank: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RanksError where the arguments of a rank's call, by name, are not those of rank 0."""
    for name, ours in by_rank[0].items():
        others = [rank for rank, arguments in by_rank.items() if arguments[name] != ours]
        if others:
            raise RanksError(
                f"{what}: {format_ranks(others)} asked for {name}={by_rank[others[0]][name]!r} where rank 0 asked for "
                f"{name}={ours!r}: every rank asks for the same"
            )
