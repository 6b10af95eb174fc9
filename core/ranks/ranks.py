"""All that one process has of the other ranks: its place among them, the council, agreements, and the post."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from tierfall.core.ranks.agreement import AGREE, Agreement
from tierfall.core.ranks.message_tree import Bodies, MessageTree, Topic
from tierfall.core.ranks.rendezvous import RankPlacement, join
from tierfall.core.ranks.topology import ALONE, Topology
from tierfall.core.ranks.transport import StoreTransport
from tierfall.core.types.errors import RanksError
from tierfall.core.types.values import Shard

logger = logging.getLogger("tierfall")

LEAVE_S = 1.0
"""So long a rank that leaves after an error still serves those that have not left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesGathered:
    """All ranks have spoken (for rank 0), or all below this leader of a node (``passed``)."""

    topic: Topic
    bodies: Bodies
    passed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionAnnounced:
    """Rank 0 has decided."""

    topic: Topic
    body: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReported:
    """One rank tells rank 0 what only it knows."""

    topic: Topic
    body: Any
    rank: int


RankMessage = MessagesGathered | DecisionAnnounced | RankReported


class Ranks:
    """See the module. ``alone`` is the one rank of a run without others: the same, and nothing is ever sent."""

    def __init__(
        self, topology: Topology, post: StoreTransport | None, *, timeout_s: float
    ) -> None:
        self.topology = topology
        self._post = post
        self._lock = threading.Lock()
        self._listener: Callable[[RankMessage], None] | None = None
        self._unheard: deque[RankMessage] = deque()
        self._handing_on = False
        self.council = MessageTree(topology, post.send if post else _ignore_data)
        self._together = Agreement(self.council, timeout_s=timeout_s)
        self.agree = self._together.agree
        self.council.on_gathered = self._on_gathered
        self.council.on_passed = self._on_passed
        self.council.on_announced = self._on_announced
        self.council.on_told = lambda topic, body, rank: self._on_message(
            RankReported(topic=topic, body=body, rank=rank)
        )
        if post is not None:
            post.start(self.council.take, self._lose)

    @classmethod
    def alone(cls) -> Ranks:
        return cls(ALONE, None, timeout_s=1.0)

    @classmethod
    def join(cls, place: RankPlacement, bootstrap: Store, *, run: str, timeout_s: float) -> Ranks:
        """Meet the others; see ``rendezvous.join``."""
        return cls(*join(place, bootstrap, run=run, timeout_s=timeout_s), timeout_s=timeout_s)

    @property
    def shard(self) -> Shard:
        return Shard(self.topology.rank, self.topology.world_size)

    @property
    def slot(self) -> int:
        """This rank's place among those of its node."""
        return self.topology.local_ranks.index(self.topology.rank)

    @property
    def many(self) -> bool:
        return self.topology.world_size > 1

    def check(self) -> None:
        """Raise RanksError where the others cannot be reached any more."""
        if self._together.lost is not None:
            raise RanksError(
                f"rank {self.topology.rank}: the other ranks cannot be reached, so nothing that is saved becomes a "
                f"checkpoint: {self._together.lost}"
            ) from self._together.lost

    def listen(self, listener: Callable[[RankMessage], None]) -> None:
        """Hand what is said from now on, and what was said before, to ``listener``: one after the other, in its order,
        on the thread that it came by. It may call this rank's council."""
        with self._lock:
            self._listener = listener
        self._forward()

    def close(self, timeout_s: float) -> None:
        """Leave. What the others still need from here are their stores: so all leave together, within ``timeout_s``."""
        if self._post is None:
            return
        patience_s = LEAVE_S
        try:
            self.agree("close: end", None, _ignore_bodies, timeout_s=timeout_s)
            patience_s = timeout_s
        except RanksError as error:
            logger.warning(
                "close: rank %d does not wait for the others: %s", self.topology.rank, error
            )
        finally:
            self._post.close(patience_s)

    def leave(self) -> None:
        """Leave at once, as after an error."""
        if self._post is not None:
            self._post.close(LEAVE_S)

    def _on_message(self, news: RankMessage) -> None:
        with self._lock:
            self._unheard.append(news)
        self._forward()

    def _forward(self) -> None:
        """Hand on what is unheard, by one thread at a time and under no lock: the listener may cause further news."""
        with self._lock:
            if self._listener is None or self._handing_on:
                return
            self._handing_on = True
        try:
            while True:
                with self._lock:
                    if not self._unheard:
                        self._handing_on = False
                        return
                    news, listener = self._unheard.popleft(), self._listener
                listener(news)
        except BaseException:
            self._handing_on = False
            raise

    def _on_gathered(self, topic: Topic, bodies: Bodies) -> None:
        if topic[0] == AGREE:
            self._together.take_gathered(topic, bodies)
        else:
            self._on_message(MessagesGathered(topic=topic, bodies=bodies))

    def _on_passed(self, topic: Topic, bodies: Bodies) -> None:
        if topic[0] != AGREE:
            self._on_message(MessagesGathered(topic=topic, bodies=bodies, passed=True))

    def _on_announced(self, topic: Topic, body: Any) -> None:
        if topic[0] == AGREE:
            self._together.take_announced(topic, body)
        else:
            self._on_message(DecisionAnnounced(topic=topic, body=body))

    def _lose(self, error: BaseException) -> None:
        logger.error("rank %d: the other ranks cannot be reached: %s", self.topology.rank, error)
        self._together.lose(error)


def _ignore_bodies(bodies: Bodies) -> None:
    """Nothing is to be decided."""


def _ignore_data(rank: int, data: bytes) -> None:
    raise AssertionError(f"a rank that is alone sends nothing, not to rank {rank}")
