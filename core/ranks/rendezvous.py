"""Rendezvous: the ranks of one start meet by a store of torchrun or torch.distributed, and open stores of their own.

Rank 0 serves a store for the job and publishes its address, with a random name for this start, in that first store. The
published address may be of an earlier start: its store is closed, or accepts no ranks, or has a registration of this
rank by a process of that start. The other ranks then read the published address again until a store accepts them.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tierfall.core.ranks.messages import Message
from tierfall.core.ranks.topology import Topology
from tierfall.core.ranks.transport import (
    Mailbox,
    StoreTransport,
    sign_off,
    sleep_longer,
    wait_for_clients,
)
from tierfall.core.ranks.wire import SECRET_BYTES
from tierfall.core.runtime.cores import core_mask
from tierfall.core.types.errors import RanksError
from tierfall.core.types.text import format_ranks

logger = logging.getLogger("tierfall")
T = TypeVar("T")

CONNECT_S = 5.0
STORE_S = 30.0
"""Bound in seconds on the connection to a store. Torch looks up the name of each address in the DNS, for its log, and a
DNS that does not answer costs 10 s and more."""
LOOK_AGAIN_S = 2.0
ANSWER_S = 5.0
"""Seconds that the other ranks wait longer than rank 0 does, for its error, which names the missing ranks."""
_LOCALHOST = "127.0.0.1"
_FIRST_PAUSE_S = 0.002

_met: dict[tuple[str, int], str] = {}
"""By key and rank, the published address by which that rank met the others last. It meets them again by another one:
the store of that address may be closing, and would hold a connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """The properties of a process before the rendezvous.

    ``node`` is any text that identifies the node; ``address`` is the host at which other ranks can connect to rank 0;
    ``settings`` must be equal on all ranks. ``cores`` are those that the process may run on.
    """

    rank: int
    world_size: int
    node: str
    address: str
    settings: dict[str, str]
    cores: str = field(default_factory=core_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreAddress(Message):
    """The address of rank 0's store; ``name`` is the random name of this start."""

    name: str
    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration(Message):
    """What a rank writes to rank 0's store. ``process`` is a random name of the process."""

    node: str
    settings: Mapping[str, str]
    cores: str
    process: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Acceptance(Message):
    """Rank 0's answer to all ranks: the node of each, and its cores, and the secret of this start; or the error that
    ends it."""

    nodes: tuple[str, ...] = ()
    cores: tuple[str, ...] = ()
    secret: str = field(default="", repr=False)
    error: str | None = None


def _encode(message: Message) -> str:
    return json.dumps(message.to_json())


Joined = tuple[Topology, StoreTransport, bytes]
"""The topology of this start, the transport of this rank, and what only the ranks of this start know."""


def join(place: RankPlacement, bootstrap: Store, *, run: str, timeout_s: float) -> Joined:
    """Meet the other ranks of this start.

    Raises RanksError. It names the ranks that did not register within ``timeout_s`` seconds, or whose settings differ.
    """
    key = f"tierfall/{run}/address"
    enter = _accept_ranks if place.rank == 0 else _find_rank_0
    what = f"open: rank {place.rank}: the store where the ranks of this job look for each other"
    bound_s = timeout_s + ANSWER_S + STORE_S
    try:
        return _within(bound_s, lambda: enter(place, bootstrap, key, timeout_s))
    except TimeoutError as error:
        raise RanksError(f"{what} does not answer: waited {bound_s:g} s in all") from error
    except RuntimeError as error:  # what torch's stores raise
        raise RanksError(f"{what} failed: {error}") from error


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises; TimeoutError after ``timeout_s`` seconds. Torch has no
    timeout for a store that accepted the connection and then hangs."""
    return _start_call(call).result(timeout_s)


def _start_call(call: Callable[[], T]) -> futures.Future[T]:
    """Run a call on a thread of its own, since it may never return."""
    future: futures.Future[T] = futures.Future()
    threading.Thread(target=_run, args=(future, call), name="tierfall-store", daemon=True).start()
    return future


def _run(future: futures.Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by the caller that waits
        future.set_exception(error)
        del future  # the error's traceback refers to this frame, and so to the store


def connect(host: str, port: int) -> TCPStore:
    """Connect to a store. Raises OSError or RuntimeError if none answers."""
    socket.create_connection((host, port), CONNECT_S).close()  # torch retries long, and logs it
    try:
        return _within(STORE_S, lambda: _store(host, port, is_master=False))
    except TimeoutError:
        raise TimeoutError(f"what listens at {host}:{port} does not answer as a store") from None


def _accept_ranks(place: RankPlacement, bootstrap: Store, key: str, timeout_s: float) -> Joined:
    """Serve a store, publish its address under ``key``, and wait for all ranks; for rank 0."""
    name = f"tierfall/{secrets.token_hex(8)}"
    server = _store(_LOCALHOST, 0, is_master=True)
    address = _StoreAddress(name=name, host=place.address, port=server.port)
    bootstrap.set(key, _encode(address))
    others = range(1, place.world_size)
    missing = _wait_for_ranks(server, name, list(others), time.monotonic() + timeout_s)
    own = _Registration(node=place.node, settings=place.settings, cores=place.cores)
    registered = {0: own}
    for rank in others:
        if rank not in missing:
            text = server.get(_registration_key(name, rank))
            registered[rank] = _Registration.from_json(json.loads(text), rank=rank)
    if missing:
        problem = f"open: {format_ranks(missing)} did not call open within {timeout_s:g} s"
    else:
        problem = _difference_of_settings(registered)
    if problem:
        server.set(_acceptance_key(name), _encode(_Acceptance(error=problem)))
        # The store ends with this process: the other ranks must have read the error before.
        guests = len(registered) - 1
        wait_for_clients(server, name, guests, time.monotonic() + LOOK_AGAIN_S)
        raise RanksError(problem)
    nodes = tuple(registered[rank].node for rank in range(place.world_size))
    cores = tuple(registered[rank].cores for rank in range(place.world_size))
    secret = secrets.token_bytes(SECRET_BYTES)
    acceptance = _Acceptance(nodes=nodes, cores=cores, secret=secret.hex())
    server.set(_acceptance_key(name), _encode(acceptance))
    topology = Topology.of(0, nodes, cores_of=cores)
    ranks = frozenset((*topology.children, 0))
    guests = len(topology.leaders) - 1 + len(topology.local_ranks) - 1
    receiving = connect(_LOCALHOST, server.port)
    mailbox = Mailbox(server, receiving, name, ranks, server=0, clients=guests)
    return topology, StoreTransport(0, (mailbox,)), secret


def _wait_for_ranks(server: TCPStore, name: str, waiting: list[int], deadline: float) -> list[int]:
    """Return the ranks that have not registered by the deadline."""
    pause = _FIRST_PAUSE_S
    while waiting := [r for r in waiting if not server.check([_registration_key(name, r)])]:
        if time.monotonic() >= deadline:
            break
        pause = sleep_longer(pause)
    return waiting


def _find_rank_0(place: RankPlacement, bootstrap: Store, key: str, timeout_s: float) -> Joined:
    """Try each address that is published under ``key`` until one accepts this rank."""
    deadline = time.monotonic() + timeout_s
    process = secrets.token_hex(8)
    tried = ""
    pause = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        published = bootstrap.get(key).decode() if bootstrap.check([key]) else None
        if published not in (None, _met.get((key, place.rank))):
            joining = _JoiningRank(place, bootstrap, key, published, process, deadline)
            found = joining.try_join()
            if found is not None:
                return found
            tried = f", or cannot be reached at {joining.host}:{joining.port}"
        pause = sleep_longer(pause)
    raise RanksError(
        f"open: rank {place.rank} met no rank 0 within {timeout_s:g} s: rank 0 did not call open{tried}"
    )


class _JoiningRank:
    """One attempt of a rank to join by the address published under ``key``."""

    def __init__(
        self,
        place: RankPlacement,
        bootstrap: Store,
        key: str,
        published: str,
        process: str,
        deadline: float,
    ) -> None:
        self._place = place
        self._bootstrap = bootstrap
        self._key = key
        self._published = published
        address = _StoreAddress.from_json(json.loads(published), rank=0)
        self._name, self.host, self.port = address.name, address.host, address.port
        self._registration = _encode(
            _Registration(
                node=place.node, settings=place.settings, cores=place.cores, process=process
            )
        )
        self._deadline = deadline
        self._is_accepted = False  # from then on, the published address is not read again
        self._has_given_up = False  # ends the thread that still waits for this store

    def try_join(self) -> Joined | None:
        """Join; return None if no rank 0 of this start answers, or another address is published meanwhile.

        The published address is read repeatedly while a thread joins, because torch retries for a long time if a store
        is closed while it connects.
        """
        entering = _start_call(self._enter)
        try:
            while not futures.wait([entering], LOOK_AGAIN_S).done:
                if self._is_accepted:
                    continue
                late = time.monotonic() >= self._deadline + STORE_S
                if late or self._bootstrap.get(self._key).decode() != self._published:
                    self._has_given_up = True
                    return None
            return entering.result()
        finally:
            del entering  # an error's traceback refers to this frame, and so to the store

    def _enter(self) -> Joined | None:
        key = _acceptance_key(self._name)
        try:
            store = connect(self.host, self.port)
            own_key = _registration_key(self._name, self._place.rank)
            if store.compare_set(own_key, "", self._registration) != self._registration.encode():
                return None  # the process of an earlier start has registered as this rank
            if not self._wait_for(store, key):
                return None
            answer = _Acceptance.from_json(json.loads(store.get(key)), rank=0)
            _met[self._key, self._place.rank] = self._published
            if answer.error is not None:
                sign_off(store, self._name)
        except (OSError, RuntimeError) as error:  # an earlier start, or none yet
            address = f"{self.host}:{self.port}"
            logger.debug("rank %d: no rank 0 at %s: %s", self._place.rank, address, error)
            return None
        if answer.error is not None:
            raise RanksError(answer.error)
        topology = Topology.of(self._place.rank, answer.nodes, cores_of=answer.cores)
        transport = StoreTransport(topology.rank, self._mailboxes(topology, store))
        return topology, transport, bytes.fromhex(answer.secret)

    def _wait_for(self, store: TCPStore, key: str) -> bool:
        """Wait until rank 0 has accepted all ranks; return False if ``try_join`` has given this address up."""
        pause = _FIRST_PAUSE_S
        while not store.check([key]):
            pause = sleep_longer(pause)
            if self._has_given_up:
                return False
            if time.monotonic() >= self._deadline + ANSWER_S:
                raise RanksError(
                    f"open: rank {self._place.rank} got no answer of rank 0 at {self.host}:{self.port}: other ranks "
                    "have not called open, or that address is of an earlier start"
                )
        self._is_accepted = True
        return True

    def _mailboxes(self, topology: Topology, store: TCPStore) -> tuple[Mailbox, ...]:
        """Open the mailboxes of this rank: in the job's store, in its node's store, or in both."""
        name, rank, local = self._name, topology.rank, frozenset(topology.local_ranks)
        try:
            if topology.node == 0:
                return (Mailbox(store, connect(self.host, self.port), name, local, server=0),)
            key = f"{name}/port/{topology.node}"
            if not topology.is_leader:
                patience = max(STORE_S, self._deadline - time.monotonic())
                store.wait([key], timedelta(seconds=patience))
                node = (_LOCALHOST, int(store.get(key)))
                leader = topology.local_ranks[0]
                return (Mailbox(connect(*node), connect(*node), name, local, server=leader),)
            own = _store(_LOCALHOST, 0, is_master=True)
            store.set(key, str(own.port))
            guests = len(local) - 1
            inside = Mailbox(
                own, connect(_LOCALHOST, own.port), name, local, server=rank, clients=guests
            )
            leaders = frozenset(topology.leaders) - {rank}
            outside = Mailbox(store, connect(self.host, self.port), name, leaders, server=0)
            return (inside, outside)
        except (OSError, RuntimeError) as error:
            raise RanksError(
                f"open: rank {rank} was accepted, and then could not reach rank {topology.parent}: {error}"
            ) from error


def _difference_of_settings(registered: Mapping[int, _Registration]) -> str:
    """Describe the first setting that differs between ranks; return '' if none does."""
    for name, ours in registered[0].settings.items():
        others = [rank for rank, one in registered.items() if one.settings.get(name) != ours]
        if others:
            return (
                f"open: {name} differs: rank 0 has {ours!r}, {format_ranks(others)} "
                f"{'has' if len(others) == 1 else 'have'} {registered[others[0]].settings.get(name)!r}; all ranks "
                "open the same configuration"
            )
    return ""


def _registration_key(name: str, rank: int) -> str:
    return f"{name}/rank/{rank}"


def _acceptance_key(name: str) -> str:
    return f"{name}/accepted"


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
    )
