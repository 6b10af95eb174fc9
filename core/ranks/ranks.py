"""What one process has of the other ranks: its topology, the message tree, agreements, and the transport."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from tierfall.core.ranks.agreement import Agreement
from tierfall.core.ranks.message_tree import MessageTree, RankMessage
from tierfall.core.ranks.rendezvous import RankPlacement, join
from tierfall.core.ranks.topology import ALONE, Topology
from tierfall.core.ranks.transport import StoreTransport
from tierfall.core.types.errors import RanksError, TierfallError
from tierfall.core.types.values import Shard

logger = logging.getLogger("tierfall")

LEAVE_S = 1.0
"""How long a rank that leaves after an error still serves its store to ranks that have not left."""


class Ranks:
    """See the module. ``alone`` returns the one rank of a run without others: the same interface; nothing is sent."""

    def __init__(
        self,
        topology: Topology,
        transport: StoreTransport | None,
        *,
        timeout_s: float,
        secret: bytes = b"",
    ) -> None:
        """``secret`` is what only the ranks of this start know."""
        self.topology = topology
        self.secret = secret
        self._transport = transport
        self._lock = threading.Lock()
        self._listener: Callable[[RankMessage], None] | None = None
        self._undelivered: deque[RankMessage] = deque()
        self._delivering = False
        self.message_tree = MessageTree(topology, transport.send if transport else _refuse_to_send)
        self._agreement = Agreement(self.message_tree, timeout_s=timeout_s)
        self._aside = Agreement(self.message_tree, timeout_s=timeout_s, name="agree aside")
        self.agree = self._agreement.agree
        self.agree_aside = self._aside.agree
        """As ``agree``, for another thread than that of the training."""
        self.meet = self._agreement.meet
        self.message_tree.on_message = self._on_message
        if transport is not None:
            transport.start(self.message_tree.receive, self._lose)

    @classmethod
    def alone(cls) -> Ranks:
        return cls(ALONE, None, timeout_s=1.0)

    @classmethod
    def join(cls, place: RankPlacement, bootstrap: Store, *, run: str, timeout_s: float) -> Ranks:
        """Meet the other ranks; see ``rendezvous.join``."""
        topology, transport, secret = join(place, bootstrap, run=run, timeout_s=timeout_s)
        return cls(topology, transport, timeout_s=timeout_s, secret=secret)

    @property
    def shard(self) -> Shard:
        return Shard(self.topology.rank, self.topology.world_size)

    @property
    def local_index(self) -> int:
        """This rank's number among those of its node, from 0."""
        return self.topology.local_ranks.index(self.topology.rank)

    @property
    def many(self) -> bool:
        return self.topology.world_size > 1

    @contextmanager
    def reporting_error(self, what: str, timeout_s: float | None = None) -> Iterator[None]:
        """Report an error in this block to the other ranks, in their next call, which is ``what``: it fails by it. What
        a call of all ranks has raised, they know."""
        try:
            yield
        except BaseException as error:
            text = str(error) or repr(error)
            if not getattr(error, "known_to_all", False):
                with suppress(
                    TierfallError
                ):  # it has the same reason: this rank raises its own error
                    self.meet(what, timeout_s=timeout_s, is_last=True, error=text)
            raise

    def watch(self, gone_s: Callable[[], float | None]) -> None:
        """Have calls of all ranks ask ``gone_s`` since when, on the monotonic clock, a rank is known to be gone: they
        do not wait for a slow one then."""
        self._agreement.gone_s = gone_s

    def check(self) -> None:
        """Raise RanksError where the other ranks cannot be reached any more."""
        if self._agreement.lost is not None:
            raise RanksError(
                f"rank {self.topology.rank}: the other ranks cannot be reached, so nothing that is saved becomes a "
                f"checkpoint: {self._agreement.lost}"
            ) from self._agreement.lost

    def set_listener(self, listener: Callable[[RankMessage], None]) -> None:
        """Deliver all messages to ``listener``, earlier ones included: one after the other, in their order, on the
        thread that each arrives on. The listener may call this rank's message tree."""
        with self._lock:
            self._listener = listener
        self._deliver()

    def close(self, timeout_s: float) -> None:
        """Leave, together with the other ranks, which may still need this rank's store; within ``timeout_s``."""
        if self._transport is None:
            return
        patience_s = LEAVE_S
        try:
            self.meet("close: end", timeout_s=timeout_s, is_last=True)
            patience_s = timeout_s
        except RanksError as error:
            logger.warning(
                "close: rank %d does not wait for the others: %s", self.topology.rank, error
            )
        finally:
            self._transport.close(patience_s)

    def leave(self) -> None:
        """Leave at once, as after an error."""
        if self._transport is not None:
            self._transport.close(LEAVE_S)

    def _on_message(self, message: RankMessage) -> None:
        for agreement in (self._agreement, self._aside):
            if message.topic[0] == agreement.name:
                agreement.on_message(message)
                return
        with self._lock:
            self._undelivered.append(message)
        self._deliver()

    def _deliver(self) -> None:
        """Deliver messages, by one thread at a time and under no lock: the listener may cause further messages."""
        with self._lock:
            if self._listener is None or self._delivering:
                return
            self._delivering = True
        try:
            while True:
                with self._lock:
                    if not self._undelivered:
                        self._delivering = False
                        return
                    message, listener = self._undelivered.popleft(), self._listener
                listener(message)
        except BaseException:
            self._delivering = False
            raise

    def _lose(self, error: BaseException) -> None:
        logger.error("rank %d: the other ranks cannot be reached: %s", self.topology.rank, error)
        self._agreement.fail_waiting(error)
        self._aside.fail_waiting(error)


def _refuse_to_send(rank: int, data: bytes) -> None:
    raise AssertionError(f"a run of one rank sends nothing, not to rank {rank}")
