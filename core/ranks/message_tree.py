"""The council: what all ranks say of one thing comes together at rank 0, and what rank 0 decides reaches them all.

A *topic* names the thing; it is used once. Each member contributes a body; leaders of nodes hand on what came through
them in one message, and rank 0 is told when all have spoken. What rank 0 announces goes down the same tree, in the
order in which it was announced. No I/O, no clock and no thread of its own: ``send`` is handed in, and never waits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.ranks.topology import Topology

Topic = tuple[str | int, ...]
Bodies = dict[int, Any]
_RECENT_MAX = 1024


@dataclass(slots=True)
class _TopicMessages:
    """What was said of a topic so far by the ranks below this one."""

    awaited: frozenset[int]
    leaders_only: bool
    bodies: Bodies = field(default_factory=dict)
    handed_on: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.bodies) == len(self.awaited)


class _RecentTopics:
    """The topics that were added last; older ones are past caring about."""

    def __init__(self) -> None:
        self._topics: dict[Topic, None] = {}

    def add(self, topic: Topic) -> None:
        self._topics[topic] = None
        if len(self._topics) > _RECENT_MAX:
            del self._topics[next(iter(self._topics))]

    def __contains__(self, topic: Topic) -> bool:
        return topic in self._topics


class MessageTree:
    """One rank's part. All methods may be called from any thread; the callbacks run on the thread that calls.

    ``on_gathered(topic, bodies by rank)`` is called at rank 0 once all have contributed, and ``on_passed`` with the
    same at every other leader of a node once all below it have; ``on_announced(topic, body)`` at every rank, also at
    rank 0; ``on_told(topic, body, rank)`` at rank 0. A callback may call the council again.
    """

    def __init__(self, topology: Topology, send: Callable[[int, bytes], None]) -> None:
        self.topology = topology
        self._send = send
        self._lock = threading.RLock()
        self._gatherings: dict[Topic, _TopicMessages] = {}
        self._forgotten = _RecentTopics()
        self._hurried = _RecentTopics()
        self.on_gathered: Callable[[Topic, Bodies], None] = _ignore
        self.on_passed: Callable[[Topic, Bodies], None] = _ignore
        self.on_announced: Callable[[Topic, Any], None] = _ignore
        self.on_told: Callable[[Topic, Any, int], None] = _ignore_rank

    def contribute(self, topic: Topic, body: Any, *, leaders_only: bool = False) -> None:
        """Say what this rank has to say of a topic; ``leaders_only``: of every node only its leader is asked, and what
        the others say is heard by nobody.

        ``body`` is made of what JSON holds.
        """
        if leaders_only and not self.topology.is_leader:
            return
        self._add(topic, {self.topology.rank: body}, leaders_only=leaders_only)

    def tell(self, topic: Topic, body: Any) -> None:
        """Tell rank 0 something that only this rank knows."""
        self._send_up({"tell": topic, "body": body, "rank": self.topology.rank})

    def announce(self, topic: Topic, body: Any) -> None:
        """Tell every rank; for rank 0."""
        assert self.topology.is_root
        self._send_down({"down": topic, "body": body})

    def take(self, data: bytes) -> None:
        """Take a message that was sent to this rank."""
        message = json.loads(data)
        if "down" in message:
            self._send_down(message)
            return
        if "tell" in message:
            self._send_up(message)
            return
        if "hurry" in message:
            self.hand_on_what_there_is(tuple(message["hurry"]))
            return
        bodies = {int(rank): body for rank, body in message["bodies"].items()}
        self._add(tuple(message["up"]), bodies, leaders_only=message["leaders_only"])

    def missing(self, topic: Topic) -> tuple[int, ...]:
        """Name the ranks below this one that were not heard of a topic, as far as is known here."""
        with self._lock:
            gathering = self._gatherings.get(topic)
            if gathering is None:
                return ()
            return tuple(sorted(gathering.awaited - gathering.bodies.keys()))

    def forget(self, topic: Topic) -> None:
        """Nobody waits for this topic any more; what is still said of it is not kept."""
        with self._lock:
            self._gatherings.pop(topic, None)
            self._forgotten.add(topic)

    def hand_on_what_there_is(self, topic: Topic) -> None:
        """Let no leader from here down wait for the others any longer: rank 0 is to know who has spoken.

        What is said from now on is handed on as it comes.
        """
        with self._lock:
            local = self.topology.local_ranks
            leaders = [rank for rank in self.topology.children if rank not in local]
            self._send_to(leaders, {"hurry": topic})
            self._hurried.add(topic)
            gathering = self._gatherings.get(topic)
            if gathering is not None:
                self._forward(topic, gathering)

    def _add(self, topic: Topic, bodies: Bodies, *, leaders_only: bool) -> None:
        with self._lock:
            if topic in self._forgotten:
                return
            gathering = self._gatherings.get(topic)
            if gathering is None:
                awaited = self._awaited(leaders_only)
                gathering = self._gatherings[topic] = _TopicMessages(awaited, leaders_only)
            gathering.bodies.update(bodies)
            complete = gathering.complete
            if complete:
                del self._gatherings[topic]
            if complete or topic in self._hurried:
                self._forward(topic, gathering)
        if complete and self.topology.is_leader:
            notify = self.on_gathered if self.topology.is_root else self.on_passed
            notify(topic, dict(sorted(gathering.bodies.items())))

    def _awaited(self, leaders_only: bool) -> frozenset[int]:
        below = self.topology.below
        return below.intersection(self.topology.leaders) if leaders_only else below

    def _forward(self, topic: Topic, gathering: _TopicMessages) -> None:
        """Send what was not sent yet to the parent; rank 0 has none."""
        fresh = {r: b for r, b in gathering.bodies.items() if r not in gathering.handed_on}
        if self.topology.parent is None or not fresh:
            return
        gathering.handed_on |= fresh.keys()
        message = {"up": topic, "bodies": fresh, "leaders_only": gathering.leaders_only}
        self._send_to([self.topology.parent], message)

    def _send_up(self, message: dict[str, Any]) -> None:
        if self.topology.parent is None:
            self.on_told(tuple(message["tell"]), message["body"], message["rank"])
        else:
            self._send_to([self.topology.parent], message)

    def _send_down(self, message: dict[str, Any]) -> None:
        with self._lock:  # so that every rank hears things in one order
            self._send_to(self.topology.children, message)
            self.on_announced(tuple(message["down"]), message["body"])

    def _send_to(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        for rank in ranks:
            self._send(rank, data)


def _ignore(topic: Topic, body: Any) -> None:
    """Nobody listens yet."""


def _ignore_rank(topic: Topic, body: Any, rank: int) -> None:
    """Nobody listens yet."""
