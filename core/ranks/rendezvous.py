"""Joining: how the ranks of one start find each other, by a store that they share already, and get stores of their own.

Rank 0 serves a store for the job and writes its address, with a random name for this start, where the others look: the
*door*. An address that an earlier start left there leads to a store that is gone, that never welcomes anybody, or where
this rank's place is taken by the process that it was then; the others look again until one lets them in.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tierfall.core.ranks.topology import Topology
from tierfall.core.ranks.transport import (
    Mailbox,
    StoreTransport,
    leave,
    sleep_longer,
    wait_for_guests,
)
from tierfall.core.types.errors import RanksError
from tierfall.core.types.text import ranks_named

logger = logging.getLogger("tierfall")
T = TypeVar("T")

CONNECT_S = 5.0
STORE_S = 30.0
"""So long may a store take to answer where somebody listens: torch asks the DNS for the name of each address, for its
log, and a DNS that does not answer costs 10 s and more."""
LOOK_AGAIN_S = 2.0
ANSWER_S = 5.0
"""So much longer than rank 0 waits for the others do they wait for what it says of those that did not come."""
_LOCALHOST = "127.0.0.1"
_FIRST_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """What a process knows of its place before it has met the others.

    ``node`` is any text that tells nodes apart; ``address`` is where rank 0 can be reached; ``settings`` is what has to
    be the same on all ranks, by name.
    """

    rank: int
    world_size: int
    node: str
    address: str
    settings: dict[str, str]


def join(
    place: RankPlacement, bootstrap: Store, *, run: str, timeout_s: float
) -> tuple[Topology, StoreTransport]:
    """Meet the other ranks of this start. Raises RanksError naming those that did not come within ``timeout_s``, and
    those whose settings differ."""
    door = f"tierfall/{run}/door"
    enter = _accept_ranks if place.rank == 0 else _join_as_guest
    what = f"open: rank {place.rank}: the store where the ranks of this job look for each other"
    bound_s = timeout_s + ANSWER_S + STORE_S
    try:
        return _within(bound_s, lambda: enter(place, bootstrap, door, timeout_s))
    except TimeoutError as error:
        raise RanksError(f"{what} does not answer: waited {bound_s:g} s in all") from error
    except RuntimeError as error:  # what torch's stores raise
        raise RanksError(f"{what} failed: {error}") from error


def _within(timeout_s: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises; TimeoutError where it does not end: torch waits for ever
    for a store that has answered before and stands still."""
    return _start_call(call).result(timeout_s)


def _start_call(call: Callable[[], T]) -> futures.Future[T]:
    """Begin a call on a thread of its own, which may never end."""
    future: futures.Future[T] = futures.Future()
    threading.Thread(target=_run, args=(future, call), name="tierfall-store", daemon=True).start()
    return future


def _run(future: futures.Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - raised by who waits
        future.set_exception(error)
        del future  # the error's traceback holds this frame, and so the store


def connect(host: str, port: int) -> TCPStore:
    """Reach a store. Raises OSError or RuntimeError where none answers."""
    socket.create_connection((host, port), CONNECT_S).close()  # torch tries long, and loudly
    try:
        return _within(STORE_S, lambda: _store(host, port, is_master=False))
    except TimeoutError:
        raise TimeoutError(f"what listens at {host}:{port} does not answer as a store") from None


def _accept_ranks(
    place: RankPlacement, bootstrap: Store, door: str, timeout_s: float
) -> tuple[Topology, StoreTransport]:
    name = f"tierfall/{secrets.token_hex(8)}"
    server = _store(_LOCALHOST, 0, is_master=True)
    bootstrap.set(door, json.dumps([name, place.address, server.port]))
    others = range(1, place.world_size)
    missing = _wait_for_hellos(server, name, list(others), time.monotonic() + timeout_s)
    said = {0: _placement_to_json(place)} | {
        rank: json.loads(server.get(_hello(name, rank))) for rank in others if rank not in missing
    }
    if missing:
        problem = f"open: {ranks_named(missing)} did not call open within {timeout_s:g} s"
    else:
        problem = _differences(said)
    if problem:
        server.set(f"{name}/welcome", json.dumps({"error": problem}))
        wait_for_guests(
            server, name, len(said) - 1, time.monotonic() + LOOK_AGAIN_S
        )  # they read it
        raise RanksError(problem)
    nodes = [said[rank]["node"] for rank in range(place.world_size)]
    server.set(f"{name}/welcome", json.dumps({"nodes": nodes}))
    topology = Topology.of(0, nodes)
    ranks = frozenset((*topology.children, 0))
    guests = len(topology.leaders) - 1 + len(topology.local_ranks) - 1
    office = Mailbox(server, connect(_LOCALHOST, server.port), name, ranks, server=0, guests=guests)
    return topology, StoreTransport(0, (office,))


def _wait_for_hellos(server: TCPStore, name: str, waiting: list[int], deadline: float) -> list[int]:
    """Give those that have not come by then."""
    pause = _FIRST_PAUSE_S
    while waiting := [rank for rank in waiting if not server.check([_hello(name, rank)])]:
        if time.monotonic() >= deadline:
            break
        pause = sleep_longer(pause)
    return waiting


def _join_as_guest(
    place: RankPlacement, bootstrap: Store, door: str, timeout_s: float
) -> tuple[Topology, StoreTransport]:
    deadline = time.monotonic() + timeout_s
    visit = secrets.token_hex(8)
    address = ""
    pause = _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        if bootstrap.check([door]):
            sign = bootstrap.get(door)
            visitor = _JoiningRank(place, bootstrap, door, sign, visit, deadline)
            found = visitor.knock()
            if found is not None:
                return found
            address = f", or cannot be reached at {visitor.host}:{visitor.port}"
        pause = sleep_longer(pause)
    raise RanksError(
        f"open: rank {place.rank} met no rank 0 within {timeout_s:g} s: rank 0 did not call open{address}"
    )


class _JoiningRank:
    """A rank before one address that stood at the door."""

    def __init__(
        self,
        place: RankPlacement,
        bootstrap: Store,
        door: str,
        sign: bytes,
        visit: str,
        deadline: float,
    ) -> None:
        self._place = place
        self._bootstrap = bootstrap
        self._door = door
        self._sign = sign
        self._hello = json.dumps(_placement_to_json(place) | {"visit": visit})
        self._deadline = deadline
        self._name, self.host, self.port = json.loads(sign)
        self._is_in = False  # let in: no other door is looked for any more
        self._has_left = False  # what may still wait here is to end

    def knock(self) -> tuple[Topology, StoreTransport] | None:
        """Go in; None where nobody is there for this process, or another address has come to stand at the door.

        The door is looked at meanwhile: torch tries for long to reach a store that went as it was being reached.
        """
        going_in = _start_call(self._enter)
        try:
            while not futures.wait([going_in], LOOK_AGAIN_S).done:
                if self._is_in:
                    continue
                late = time.monotonic() >= self._deadline + STORE_S
                if late or self._bootstrap.get(self._door) != self._sign:
                    self._has_left = True
                    return None
            return going_in.result()
        finally:
            del going_in  # an error's traceback holds this frame, and so the store

    def _enter(self) -> tuple[Topology, StoreTransport] | None:
        key = f"{self._name}/welcome"
        try:
            store = connect(self.host, self.port)
            hello = _hello(self._name, self._place.rank)
            if store.compare_set(hello, "", self._hello) != self._hello.encode():
                return None  # what this rank was in an earlier start was here
            if not self._wait_for(store, key):
                return None
            answer = json.loads(store.get(key))
            if "error" in answer:
                leave(store, self._name)
        except (OSError, RuntimeError) as error:  # of an earlier start, or not there yet
            logger.debug("rank %d: nobody at %s: %s", self._place.rank, self._sign, error)
            return None
        if "error" in answer:
            raise RanksError(answer["error"])
        topology = Topology.of(self._place.rank, answer["nodes"])
        return topology, StoreTransport(topology.rank, self._mailboxes(topology, store))

    def _wait_for(self, store: TCPStore, welcome: str) -> bool:
        """Wait to be let in; False where this rank has left for another door."""
        pause = _FIRST_PAUSE_S
        while not store.check([welcome]):
            pause = sleep_longer(pause)
            if self._has_left:
                return False
            if time.monotonic() >= self._deadline + ANSWER_S:
                raise RanksError(
                    f"open: rank {self._place.rank} waited in vain at {self.host}:{self.port} for rank 0 to say that "
                    "all ranks have come: others have not called open, or that address is of an earlier start"
                )
        self._is_in = True
        return True

    def _mailboxes(self, topology: Topology, store: TCPStore) -> tuple[Mailbox, ...]:
        """Reach those that this rank exchanges messages with: by the job's store, or by that of its node."""
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
                own, connect(_LOCALHOST, own.port), name, local, server=rank, guests=guests
            )
            leaders = frozenset(topology.leaders) - {rank}
            outside = Mailbox(store, connect(self.host, self.port), name, leaders, server=0)
            return (inside, outside)
        except (OSError, RuntimeError) as error:
            raise RanksError(
                f"open: rank {rank} was let in, and then could not reach rank {topology.parent}: {error}"
            ) from error


def _placement_to_json(place: RankPlacement) -> dict[str, Any]:
    return {"node": place.node, "settings": place.settings}


def _differences(said: dict[int, dict[str, Any]]) -> str:
    """Say what is not the same on all ranks; nothing where all is."""
    ours = said[0]["settings"]
    for what in ours:
        others = [rank for rank, one in said.items() if one["settings"].get(what) != ours[what]]
        if others:
            return (
                f"open: {what} differs: rank 0 has {ours[what]!r}, {ranks_named(others)} "
                f"{'has' if len(others) == 1 else 'have'} {said[others[0]]['settings'].get(what)!r}; all ranks open "
                "the same configuration"
            )
    return ""


def _hello(name: str, rank: int) -> str:
    return f"{name}/hello/{rank}"


def _store(host: str, port: int, *, is_master: bool) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=STORE_S),
    )
