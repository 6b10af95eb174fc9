"""The message tree: rank 0 gathers what all ranks contribute to a topic, and announces its decisions to all ranks.

A *topic* names what the messages are about; it is used once. Each rank contributes a body. The leader of a node
forwards the bodies of all ranks below it in one message, and rank 0 is notified when every rank has contributed. An
announcement passes down the same tree; all ranks receive announcements in one order. The tree does no I/O, reads no
clock and has no thread: it is given ``send``, which never waits.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from tierfall.core.ranks.messages import Message, Topic, from_json, to_json
from tierfall.core.ranks.topology import Topology

Bodies = dict[int, object]
"""What ranks have contributed, in JSON form, by rank."""
_RECENT_MAX = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesGathered:
    """All ranks have contributed to a topic (at rank 0), or all below this leader of a node (``passed``)."""

    topic: Topic
    bodies: Bodies
    passed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionAnnounced(Message):
    """Rank 0 has announced a decision."""

    topic: Topic
    body: object


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReported(Message):
    """``rank`` has reported to rank 0 what only it knows."""

    topic: Topic
    body: object
    rank: int


RankMessage = MessagesGathered | DecisionAnnounced | RankReported


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contributions(Message):
    """Bodies of some ranks below the sender, on their way to rank 0."""

    topic: Topic
    bodies: Mapping[int, object]
    leaders_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Withdrawal(Message):
    """``rank`` takes back what it has contributed."""

    topic: Topic
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlushRequest(Message):
    """The leaders below rank 0 are to forward what they have of a topic."""

    topic: Topic


_ENVELOPES: tuple[type[Message], ...] = (
    _Contributions,
    RankReported,
    DecisionAnnounced,
    _FlushRequest,
    _Withdrawal,
)


@dataclass(slots=True)
class _Gathering:
    """What the ranks below this one have contributed to a topic so far."""

    awaited: frozenset[int]
    leaders_only: bool
    bodies: Bodies = field(default_factory=dict)
    forwarded: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return len(self.bodies) == len(self.awaited)


def _remember(topics: dict[Topic, None], topic: Topic) -> None:
    """Add a topic. No more messages come about topics that were added long before."""
    topics[topic] = None
    if len(topics) > _RECENT_MAX:
        del topics[next(iter(topics))]


class MessageTree:
    """One rank's part. All methods may be called from any thread. ``on_message`` receives what the tree has for this
    rank, on the thread that calls; it may call the tree again."""

    def __init__(self, topology: Topology, send: Callable[[int, bytes], None]) -> None:
        self.topology = topology
        self._send = send
        self._lock = threading.RLock()
        self._gatherings: dict[Topic, _Gathering] = {}
        self._forgotten: dict[Topic, None] = {}
        self._flushed: dict[Topic, None] = {}
        self.on_message: Callable[[RankMessage], None] = lambda message: None

    def contribute(self, topic: Topic, body: object, *, leaders_only: bool = False) -> None:
        """Contribute this rank's ``body``, in JSON form, to a topic. ``leaders_only``: only leaders of nodes
        contribute; the call does nothing on the other ranks."""
        if leaders_only and not self.topology.is_leader:
            return
        self._add(topic, {self.topology.rank: body}, leaders_only=leaders_only)

    def withdraw(self, topic: Topic) -> None:
        """Take back what this rank has contributed to a topic that is not decided on; it may contribute again."""
        self._withdraw(_Withdrawal(topic=topic, rank=self.topology.rank))

    def report(self, topic: Topic, body: object) -> None:
        """Report to rank 0 what only this rank knows."""
        self._send_up(RankReported(topic=topic, body=body, rank=self.topology.rank))

    def announce(self, topic: Topic, body: object) -> None:
        """Send to every rank; for rank 0."""
        assert self.topology.is_root
        self._send_down(DecisionAnnounced(topic=topic, body=body))

    def receive(self, data: bytes, sender: int) -> None:
        """Process a message that ``sender`` has sent to this rank. Raises RanksError where it is malformed."""
        number, body = from_json(tuple[int, object], json.loads(data), rank=sender)
        message = from_json(_ENVELOPES[number], body, rank=sender)
        match message:
            case DecisionAnnounced():
                self._send_down(message)
            case RankReported():
                self._send_up(message)
            case _FlushRequest():
                self.flush_partial(message.topic)
            case _Withdrawal():
                self._withdraw(message)
            case _Contributions():
                self._add(message.topic, message.bodies, leaders_only=message.leaders_only)

    def missing(self, topic: Topic) -> tuple[int, ...]:
        """Return the ranks below this one whose contribution to a topic has not arrived here."""
        with self._lock:
            gathering = self._gatherings.get(topic)
            if gathering is None:
                return ()
            return tuple(sorted(gathering.awaited - gathering.bodies.keys()))

    def was_withdrawn(self, topic: Topic) -> bool:
        """Return whether a rank has taken its contribution back; for rank 0, before it calls ``flush_partial``."""
        return topic in self._flushed

    def forget(self, topic: Topic) -> None:
        """Discard the contributions to a topic, and ignore later ones."""
        with self._lock:
            self._gatherings.pop(topic, None)
            _remember(self._forgotten, topic)

    def flush_partial(self, topic: Topic) -> None:
        """Have every leader from here down forward what it has of a topic, although contributions are missing; later
        ones are forwarded as they arrive. So rank 0 knows which ranks are late."""
        with self._lock:
            local = self.topology.local_ranks
            leaders = [rank for rank in self.topology.children if rank not in local]
            self._send_to(leaders, _FlushRequest(topic=topic))
            _remember(self._flushed, topic)
            gathering = self._gatherings.get(topic)
            if gathering is not None:
                self._forward(topic, gathering)

    def _add(self, topic: Topic, bodies: Mapping[int, object], *, leaders_only: bool) -> None:
        with self._lock:
            if topic in self._forgotten:
                return
            gathering = self._gatherings.get(topic)
            if gathering is None:
                awaited = self.topology.below
                if leaders_only:
                    awaited = awaited.intersection(self.topology.leaders)
                gathering = self._gatherings[topic] = _Gathering(awaited, leaders_only)
            gathering.bodies.update(bodies)
            complete = gathering.complete
            if complete:
                del self._gatherings[topic]
            if complete or topic in self._flushed:
                self._forward(topic, gathering)
        if complete and self.topology.is_leader:
            bodies = dict(sorted(gathering.bodies.items()))
            passed = not self.topology.is_root
            self.on_message(MessagesGathered(topic=topic, bodies=bodies, passed=passed))

    def _withdraw(self, message: _Withdrawal) -> None:
        with self._lock:
            gathering = self._gatherings.get(message.topic)
            if gathering is not None:
                gathering.bodies.pop(message.rank, None)
                gathering.forwarded.discard(message.rank)
            # Else later ones would wait for those that were forwarded.
            _remember(self._flushed, message.topic)
            if self.topology.parent is not None:
                self._send_to([self.topology.parent], message)

    def _forward(self, topic: Topic, gathering: _Gathering) -> None:
        """Send the bodies that were not sent yet to the parent; rank 0 has none."""
        bodies = {r: b for r, b in gathering.bodies.items() if r not in gathering.forwarded}
        if self.topology.parent is None or not bodies:
            return
        gathering.forwarded |= bodies.keys()
        leaders_only = gathering.leaders_only
        message = _Contributions(topic=topic, bodies=bodies, leaders_only=leaders_only)
        self._send_to([self.topology.parent], message)

    def _send_up(self, message: RankReported) -> None:
        if self.topology.parent is None:
            self.on_message(message)
        else:
            self._send_to([self.topology.parent], message)

    def _send_down(self, message: DecisionAnnounced) -> None:
        with self._lock:  # so that all ranks receive announcements in one order
            self._send_to(self.topology.children, message)
            self.on_message(message)

    def _send_to(self, ranks: Collection[int], message: Message) -> None:
        if not ranks:
            return
        envelope = [_ENVELOPES.index(type(message)), to_json(message)]
        data = json.dumps(envelope, separators=(",", ":")).encode()
        for rank in ranks:
            self._send(rank, data)
