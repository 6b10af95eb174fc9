"""Pulls: how ranks that restore a checkpoint get chunks from each other.

A pull names the image, the chunk with its digest, and its *source*: the rank that reads it from its tiers; its
connection is of one checkpoint of one attempt. Whoever is asked loads the chunk once, keeps it in a bounded pool until
all ranks that were assigned it have taken it, and says meanwhile that it still loads. It announces to those ranks
what it has for them: they ask for what is there, in the order in which it arrives. Within a node no port is
opened, and a chunk is handed over as a file in memory. A pull from which nothing comes is an error like that of a tier
that does not answer.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from tierfall.core.copies.checkpoint_reader import PASSABLE
from tierfall.core.ranks.addresses import is_loopback, listen, own_address
from tierfall.core.ranks.messages import ErrorMessage, Message
from tierfall.core.ranks.serving import Server
from tierfall.core.ranks.topology import Topology
from tierfall.core.ranks.wire import (
    Connection,
    Head,
    WireError,
    connect_as,
    listen_on_node,
)
from tierfall.core.restore.assign import Chunk, name_of
from tierfall.core.runtime.buffers import allocate
from tierfall.core.runtime.threads import WAKE_S, InterruptedWaitError, interrupt_of_thread
from tierfall.core.types.errors import UnreachableError, error_class

logger = logging.getLogger("tierfall")

AHEAD_BYTES, AHEAD_CHUNKS_MIN = 32 << 20, 2
"""Of the chunks that a rank reads before it is asked for them, and how many it may read so, however large they are."""
POOL_BYTES, POOL_CHUNKS_MIN = 128 << 20, 4
"""The most that a rank keeps for others, in bytes, and how many chunks it may keep however large they are. A chunk that
goes before all have taken it is read again."""
ALIVE_S = WAKE_S / 2
"""Seconds between two signs of life of a rank. Others wait ``WAKE_S`` for one, even if ``max_wait`` is shorter."""
CLOSE_S = 1.0
GONE: Chunk = (-2, 0)
"""In place of a chunk: rank 0 is told that a rank is gone."""
ARRIVALS: Chunk = (-3, 0)
"""In place of a chunk: the rank tells this one of each chunk that it has for it, as it comes."""


class NothingCameError(UnreachableError):
    """A rank that was asked for a chunk has not sent it: nothing is known of the chunk."""


# Chunks in memory ------------------------------------------------------------------------------------


class ChunkMemory:
    """Memory that other processes of this node may map. It lasts as long as one of them does."""

    def __init__(self, file: int, size: int) -> None:
        """``file`` is an open file of that memory, which this object owns."""
        self.file = file
        self.view = memoryview(mmap.mmap(file, size))

    @classmethod
    def of_size(cls, size: int) -> ChunkMemory:
        """Return new memory of ``size`` bytes, all zero, which is allocated as it is written. Raises OSError."""
        file = os.memfd_create("tierfall-load")
        os.ftruncate(file, size)
        return cls(file, size)

    def private_view(self) -> memoryview:
        """Return a view of the same memory, of which each page that is written becomes this process's own."""
        return memoryview(mmap.mmap(self.file, len(self.view), flags=mmap.MAP_PRIVATE))

    @classmethod
    def holding(cls, view: memoryview) -> ChunkMemory:
        """Return new memory that holds these bytes. They are written: to fill a mapping takes twice as long."""
        file, done = os.memfd_create("tierfall-chunk"), 0
        while done < len(view):
            done += os.write(file, view[done:])
        return cls(file, done)

    def __del__(self) -> None:
        os.close(self.file)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedChunk:
    """A verified chunk, and the tier that it was read from, by its number in the chain. Before a header is its
    manifest, of ``first`` bytes. ``memory`` is None unless it can be handed over."""

    view: memoryview
    tier: int
    digest: str = ""
    first: int = 0
    memory: ChunkMemory | None = None

    def shared(self) -> LoadedChunk:
        """Return the chunk in memory that can be handed over; as it is, to be sent, where there is no such memory."""
        try:
            memory = ChunkMemory.holding(self.view)
        except (OSError, AttributeError) as error:  # some builds of Python do not have the call
            logger.debug("restore: a chunk is sent to other ranks of this node: %s", error)
            return self
        return replace(self, view=memory.view, memory=memory)


Load = Callable[[], LoadedChunk]
Key = tuple[Chunk, int]
"""A chunk, and the rank that reads it."""


class ChunkPool:
    """The chunks that a rank keeps for others: each is loaded once, on a thread of its own, and kept until all ranks
    that are expected have taken it. If the pool is full, the one goes that was used least recently, and is loaded again
    if it is asked for."""

    def __init__(self, *, patience_s: float) -> None:
        """``patience_s``: how long ``wait_for_room`` waits for a rank to take anything."""
        self._patience_s: float = patience_s
        self._changed = threading.Condition()
        self._chunks: OrderedDict[Key, futures.Future[LoadedChunk]] = OrderedDict()
        self._expected: Mapping[Key, frozenset[int]] = {}
        self._taken: dict[Key, set[int]] = {}
        self._taken_s = 0.0
        self._arrived: list[Key] = []
        self._closed = False

    def expect(self, takers: Mapping[Key, frozenset[int]]) -> None:
        """Keep each of these chunks until its takers have it; some of them may have taken it already."""
        self._expected = takers

    def expected(self, key: Key) -> frozenset[int]:
        """Return the ranks that are expected to take a chunk, or were."""
        return self._expected.get(key, frozenset())

    def load(self, key: Key, load: Load) -> futures.Future[LoadedChunk]:
        """Return a chunk, which ``load`` loads if nobody has asked for it before. An error is kept, too."""
        with self._changed:
            found = self._chunks.get(key)
            if found is not None:
                self._chunks.move_to_end(key)
                return found
            future = self._chunks[key] = futures.Future()
        run = partial(self._run, key, future, load)
        try:
            threading.Thread(target=run, name="tierfall-pulls-load", daemon=True).start()
        except RuntimeError:  # at the limit of threads
            run()
        return future

    def taken(self, key: Key, rank: int) -> None:
        """Record that a rank has a chunk."""
        with self._changed:
            self._taken_s = time.monotonic()
            self._taken.setdefault(key, set()).add(rank)
            if key in self._expected and not self._is_awaited(key):
                self._chunks.pop(key, None)
            self._changed.notify_all()

    def wait_for_room(self, size: int) -> bool:
        """Wait until a chunk of ``size`` bytes fits beside what is kept and loaded; False once the pool is closed.
        Nobody waits for ranks that take nothing: they may be gone."""
        began_s = time.monotonic()
        with self._changed:
            while not self._closed and not self._has_room(size):
                if time.monotonic() - max(began_s, self._taken_s) > self._patience_s:
                    self._patience_s = 0.0  # from now on
                    break
                self._changed.wait(ALIVE_S)
            return not self._closed

    def arrivals(self, rank: int) -> Iterator[list[Chunk]]:
        """Yield the chunks that ``rank`` is expected to take, as they are loaded, or could not be; none, while it
        waits for the next. This ends once chunks are loaded only if they are asked for."""
        at = 0
        while not self._closed:
            with self._changed:
                if len(self._arrived) == at or not self._expected:
                    self._changed.wait(ALIVE_S)
                new = self._arrived[at:] if self._expected else []
            at += len(new)
            yield [key[0] for key in new if rank in self.expected(key)]

    def close(self) -> None:
        """Load nothing any more before it is asked for."""
        with self._changed:
            self._closed = True
            self._chunks.clear()
            self._changed.notify_all()

    def _run(self, key: Key, future: futures.Future[LoadedChunk], load: Load) -> None:
        try:
            future.set_result(load())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the chunk
            future.set_exception(error)
        with self._changed:
            self._arrived.append(key)
            self._changed.notify_all()
            while len(kept := self._kept()) > POOL_CHUNKS_MIN and sum(kept.values()) > POOL_BYTES:
                del self._chunks[next(iter(kept))]

    def _kept(self) -> dict[Key, int]:
        """Return the bytes of the chunks that are loaded, least recently used first."""
        return {
            key: len(future.result().view)
            for key, future in self._chunks.items()
            if future.done() and future.exception() is None
        }

    def _is_awaited(self, key: Key) -> bool:
        return not self.expected(key) <= self._taken.get(key, set())

    def _has_room(self, size: int) -> bool:
        awaited = [bytes for key, bytes in self._kept().items() if self._is_awaited(key)]
        loading = sum(not future.done() for future in self._chunks.values())
        used = sum(awaited) + loading * size
        return len(awaited) + loading < AHEAD_CHUNKS_MIN or used + size <= AHEAD_BYTES


# Between ranks ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress(Message):
    """Where a rank is asked for chunks: by ``name`` on its node, by ``host`` and ``port`` from others; nothing of it is
    given if it is not asked so."""

    name: str = ""
    host: str = ""
    port: int = 0


class PullNetwork:
    """The connections of a rank with the others that restore the same ``checkpoint``, from its construction until
    ``close``: it is asked for chunks at ``address``, and asks others once it has met them. Threads share it. A rank
    that once did not answer is not asked again: it is in ``silent``.

    With several nodes it listens on a port, on the network that ``interface`` names; with several ranks on this node,
    by a name on the node. ``provide`` returns the chunk that another rank asks for, by its source; ``pool`` keeps them.
    A rank may say nothing for ``silence_s``.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        secret: bytes,
        checkpoint: str,
        interface: str | None,
        silence_s: float,
        provide: Callable[[Chunk, int, str], futures.Future[LoadedChunk]],
        pool: ChunkPool,
    ) -> None:
        self.address = RankAddress()
        self.silent: set[int] = set()
        self._topology, self._secret, self._checkpoint = topology, secret, checkpoint
        self._silence_s, self._provide, self._pool = silence_s, provide, pool
        self._name = secrets.token_hex(8)
        self._met = threading.Event()
        self._addresses: Sequence[RankAddress] = ()
        self._lock = threading.Lock()
        self._servers: list[Server] = []
        self._idle: dict[int, list[Connection]] = {}
        self._lost_s: float | None = None
        self._reaches = False
        """Whether a rank of another node has answered."""
        self._closed = False
        try:
            self.address = self._listen(interface)
        except (OSError, RuntimeError) as error:  # out of descriptors, or threads
            logger.warning("restore: other ranks cannot ask this one for chunks: %s", error)

    def _listen(self, interface: str | None) -> RankAddress:
        name, host, port = f"tierfall-{self._name}", "", 0
        serve = partial(
            Server, secret=self._secret, run=self._checkpoint, serve=self._serve, name="pulls"
        )
        if len(self._topology.nodes) > 1:
            host = _host(interface)
            self._servers.append(serve(listen(host if interface else "")))
            port = self._servers[-1].port
        if len(self._topology.local_ranks) > 1:
            self._servers.append(serve(listen_on_node(name)))
        return RankAddress(name=name, host=host, port=port)

    def meet(self, addresses: Sequence[RankAddress]) -> None:
        """Learn the addresses of all ranks."""
        self._addresses = addresses
        self._met.set()

    def lost_s(self) -> float | None:
        """Return since when, on the monotonic clock, a rank is known to be gone: it has closed a connection. None if
        none is. Rank 0, which decides for all, is told: few ranks have a connection to the one that is gone."""
        with self._lock:
            idle = (connection for those in self._idle.values() for connection in those)
            if self._lost_s is not None or not any(each.is_readable(0) for each in idle):
                return self._lost_s
            self._lost_s = time.monotonic()
        if not self._topology.is_root:
            with suppress(RuntimeError):  # at the limit of threads
                threading.Thread(target=self._tell_root, daemon=True).start()
        return self._lost_s

    def _tell_root(self) -> None:
        with suppress(OSError, UnreachableError):  # it has ended too
            connection = self._take(0)
            try:
                self._ask(connection, GONE, 0, "")
            finally:
                connection.close()

    def close(self) -> None:
        """Close all connections; no pull may begin any more."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connection in (each for those in idle.values() for each in those):
            connection.close()
        for server in self._servers:
            server.close(CLOSE_S)

    # What others ask for -----------------------------------------------------------------------------

    def _serve(self, connection: Connection, sender: str) -> None:
        while True:
            connection.set_timeout(None)
            head, length = connection.receive()
            if length:
                raise WireError("a pull comes with bytes")
            connection.set_timeout(self._silence_s)
            try:
                chunk, source = (int(head["image"]), int(head["chunk"])), int(head["source"])
                if chunk == GONE:
                    self._lost_s = self._lost_s or time.monotonic()
                    raise UnreachableError("it is noted")
                if chunk == ARRIVALS:
                    for here in self._pool.arrivals(int(sender)):
                        connection.send({"chunks": here})
                    raise UnreachableError("no more is loaded before it is asked for")
                loaded = self._load(connection, chunk, source, head)
            except WireError:
                raise
            except Exception as error:  # noqa: BLE001 - the other rank must know
                found = ErrorMessage.of(error)
                connection.send({"error": found.kind, "text": found.text})
                continue
            answer = {"tier": loaded.tier, "first": loaded.first, "bytes": len(loaded.view)}
            if connection.socket.family == socket.AF_UNIX and loaded.memory is not None:
                connection.send_file(answer, loaded.memory.file)
            else:
                connection.send(answer, loaded.view)
            self._pool.taken((chunk, source), int(sender))

    def _load(self, connection: Connection, chunk: Chunk, source: int, head: Head) -> LoadedChunk:
        future = self._provide(chunk, source, str(head["digest"]))
        while not futures.wait([future], ALIVE_S).done:
            connection.send({"loads": True})
        loaded = future.result()
        if head["digest"] not in ("", loaded.digest):
            raise UnreachableError(f"{name_of(chunk)} is of another snapshot here")
        return loaded

    # What this rank asks for -------------------------------------------------------------------------

    def pull(self, hop: int, chunk: Chunk, source: int, digest: str) -> LoadedChunk:
        """Get a chunk of ``source`` from the rank ``hop``. Raises NothingCameError, or the error of that rank."""
        if hop in self.silent or not self._met.wait(self._silence_s):
            raise NothingCameError(f"rank {hop} is not asked")
        connection: Connection | None = None
        memory: ChunkMemory | None = None
        try:
            connection = self._take(hop)
            answer, length = self._ask(connection, chunk, source, digest)
            if length:
                connection.fill(view := allocate(length))
            elif "error" not in answer:
                memory = ChunkMemory(connection.receive_file(), int(answer["bytes"]))
                view = memory.view
        except (OSError, UnreachableError, ValueError, KeyError) as error:
            self._note_silent(hop, error)
            raise NothingCameError(f"rank {hop} sends nothing: {error}") from error
        except BaseException:  # interrupted: an answer may be on its way
            if connection is not None:
                connection.close()
            raise
        finally:
            self._keep(hop, connection)
        if "error" in answer:
            kind, text = error_class(str(answer["error"]), UnreachableError), str(answer["text"])
            raise kind(text) if issubclass(kind, PASSABLE) else UnreachableError(text)
        tier, first = int(answer["tier"]), int(answer["first"])
        return LoadedChunk(view=view, tier=tier, digest=digest, first=first, memory=memory)

    def arrivals(self, hop: int) -> Iterator[Iterable[Chunk]]:
        """Yield the chunks that a rank, or this one, has for this one, as they come to it. This ends if it says no
        more."""
        if hop == self._topology.rank:
            yield from self._pool.arrivals(hop)
            return
        connection: Connection | None = None
        try:
            connection = self._take(hop)
            answer, _ = self._ask(connection, ARRIVALS, hop, "")
            while "error" not in answer and hop not in self.silent:
                yield [(int(image), int(index)) for image, index in answer["chunks"]]
                answer, _ = self._answer(connection)
        except (OSError, UnreachableError, ValueError, KeyError, TypeError) as error:
            self._note_silent(hop, error)
        finally:
            if connection is not None:
                connection.close()

    def _ask(
        self, connection: Connection, chunk: Chunk, source: int, digest: str
    ) -> tuple[Head, int]:
        image, index = chunk
        connection.send({"image": image, "chunk": index, "digest": digest, "source": source})
        return self._answer(connection)

    def _answer(self, connection: Connection) -> tuple[Head, int]:
        while True:
            until_s = time.monotonic() + self._silence_s
            while not connection.is_readable(WAKE_S):
                check_interrupt()
                if time.monotonic() >= until_s:
                    raise TimeoutError(f"it was silent for {self._silence_s:g} s")
            answer, length = connection.receive()
            if "loads" not in answer:
                return answer, length

    def _take(self, hop: int) -> Connection:
        """Return an idle connection to a rank, or a new one."""
        with self._lock:
            if idle := self._idle.get(hop):
                return idle.pop()
        known = self._addresses[hop]
        connection = connect_as(
            str(self._topology.rank),
            known.name if hop in self._topology.local_ranks else (known.host, known.port),
            self._secret,
            run=self._checkpoint,
            timeout_s=self._silence_s,
        )
        connection.set_timeout(self._silence_s)
        self._reaches |= hop not in self._topology.local_ranks
        return connection

    def _keep(self, hop: int, connection: Connection | None) -> None:
        """Keep a connection for the next pull; that to a rank which is silent shows whether it is gone."""
        if connection is None or connection.is_closed:
            return
        with self._lock:
            if not self._closed:
                self._idle.setdefault(hop, []).append(connection)
                return
        connection.close()

    def _note_silent(self, hop: int, error: Exception) -> None:
        with self._lock:
            is_first = not self.silent and not self._closed
            self.silent.add(hop)
            here = self._topology.local_ranks
            if isinstance(error, TimeoutError) and not (self._reaches or hop in here):
                # the network lets nothing through: not each rank of it is waited for
                self.silent.update(
                    rank for rank in range(self._topology.world_size) if rank not in here
                )
        if is_first:
            logger.warning(
                "restore: rank %d does not send what it is asked for: %s. Other ranks read its part",
                hop, str(error) or type(error).__name__,
            )  # fmt: skip


def check_interrupt() -> None:
    """Raise InterruptedWaitError if the thread that waits for this one was interrupted."""
    event = interrupt_of_thread()
    if event is not None and event.is_set():
        raise InterruptedWaitError


def wait_for(future: futures.Future[LoadedChunk]) -> LoadedChunk:
    """Return a chunk once it is loaded; raises its error."""
    while not futures.wait([future], WAKE_S).done:
        check_interrupt()
    return future.result()


def _host(interface: str | None) -> str:
    """Return the address of this node for others. A node whose own name leads to itself alone, as 127.0.1.1 in
    /etc/hosts, is found by the name that the launcher has given to the others."""
    host = own_address(interface)
    return os.environ.get("MASTER_ADDR", host) if is_loopback(host) else host
