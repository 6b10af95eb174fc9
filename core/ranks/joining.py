"""Joining: how the ranks of one start find each other, by a store that they share already, and get stores of their own.

Rank 0 serves a store for the job and writes its address, with a random name for this start, where the others look: the
*door*. An address that an earlier start left there leads to a store that is gone, or that never welcomes anybody; the
others look again until one does.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from tierfall.core.errors import RanksError
from tierfall.core.ranks.post import Office, StorePost
from tierfall.core.ranks.topology import Topology
from tierfall.core.words import ranks_named

logger = logging.getLogger("tierfall")

CONNECT_S = 20.0
LOOK_AGAIN_S = 2.0
_LOCALHOST = "127.0.0.1"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    place: Place, bootstrap: Store, *, run: str, timeout_s: float
) -> tuple[Topology, StorePost]:
    """Meet the other ranks of this start. Raises RanksError naming those that did not come within ``timeout_s``, and
    those whose settings differ."""
    door = f"tierfall/{run}/door"
    if place.rank == 0:
        return _welcome(place, bootstrap, door, timeout_s)
    return _enter(place, bootstrap, door, timeout_s)


def _welcome(
    place: Place, bootstrap: Store, door: str, timeout_s: float
) -> tuple[Topology, StorePost]:
    name = f"tierfall/{secrets.token_hex(8)}"
    server = _serve(place.address)
    bootstrap.set(door, json.dumps([name, place.address, server.port]))
    hello = [_hello(name, rank) for rank in range(1, place.world_size)]
    deadline = time.monotonic() + timeout_s
    waiting = list(range(1, place.world_size))
    pause = _FIRST_PAUSE_S
    while waiting:
        waiting = [rank for rank in waiting if not server.check([_hello(name, rank)])]
        if waiting and time.monotonic() >= deadline:
            error = f"open: {ranks_named(waiting)} did not call open within {timeout_s:g} s"
            server.set(f"{name}/welcome", json.dumps({"error": error}))
            time.sleep(LOOK_AGAIN_S / 4)  # those that came read it; then the store goes
            raise RanksError(error)
        pause = _rest(pause) if waiting else pause
    said = {0: _said(place)} | {
        rank: json.loads(server.get(key)) for rank, key in enumerate(hello, start=1)
    }
    problem = _differences(said)
    nodes = [said[rank]["node"] for rank in range(place.world_size)]
    server.set(f"{name}/welcome", json.dumps({"error": problem} if problem else {"nodes": nodes}))
    if problem:
        time.sleep(LOOK_AGAIN_S / 4)
        raise RanksError(problem)
    topology = Topology.of(0, nodes)
    ranks = frozenset((*topology.children, 0))
    office = Office(server, _connect(place.address, server.port), name, ranks)
    return topology, StorePost(0, (office,), (server,))


def _enter(
    place: Place, bootstrap: Store, door: str, timeout_s: float
) -> tuple[Topology, StorePost]:
    deadline = time.monotonic() + timeout_s
    while True:
        _wait_for(bootstrap, door, deadline, place, timeout_s)
        sign = bootstrap.get(door)
        name, address, port = json.loads(sign)
        found = _knock(place, name, (address, port), _same_sign(bootstrap, door, sign), deadline)
        if found is not None:
            return found
        if time.monotonic() >= deadline:
            raise _nobody(place, timeout_s)
        time.sleep(_LONGEST_PAUSE_S)


def _same_sign(bootstrap: Store, door: str, sign: bytes) -> Callable[[], bool]:
    return lambda: bool(bootstrap.get(door) == sign)


def _knock(
    place: Place,
    name: str,
    door: tuple[str, int],
    still_there: Callable[[], bool],
    deadline: float,
) -> tuple[Topology, StorePost] | None:
    """Knock at one address; None where nobody is there, or another address has come to stand at the door."""
    try:
        socket.create_connection(door, CONNECT_S).close()  # torch tries long, and loudly
        store = _connect(*door)
        store.set(_hello(name, place.rank), json.dumps(_said(place)))
        pause = _FIRST_PAUSE_S
        look_at = time.monotonic() + LOOK_AGAIN_S
        while not store.check([f"{name}/welcome"]):
            pause = _rest(pause)
            now = time.monotonic()
            if now >= deadline:
                return None
            if now >= look_at:
                if not still_there():
                    return None
                look_at = now + LOOK_AGAIN_S
        answer = json.loads(store.get(f"{name}/welcome"))
        if "error" in answer:
            raise RanksError(answer["error"])
        topology = Topology.of(place.rank, answer["nodes"])
        return topology, _post(topology, name, store, door)
    except (OSError, RuntimeError) as error:  # of an earlier start, or not there yet
        logger.debug("rank %d: nobody at %s: %s", place.rank, door, error)
        return None


def _post(topology: Topology, name: str, store: TCPStore, door: tuple[str, int]) -> StorePost:
    """Reach those that this rank exchanges messages with: by the job's store, or by that of its node."""
    rank, local = topology.rank, frozenset(topology.local_ranks)
    if topology.node == 0:
        return StorePost(rank, (Office(store, _connect(*door), name, local),), ())
    key = f"{name}/port/{topology.node}"
    if not topology.is_leader:
        node = (_LOCALHOST, int(store.get(key)))  # waits for it
        return StorePost(rank, (Office(_connect(*node), _connect(*node), name, local),), ())
    own = _serve(_LOCALHOST)
    store.set(key, str(own.port))
    inside = Office(own, _connect(_LOCALHOST, own.port), name, local)
    leaders = frozenset(topology.leaders) - {rank}
    return StorePost(rank, (inside, Office(store, _connect(*door), name, leaders)), (own,))


def _said(place: Place) -> dict[str, Any]:
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


def _wait_for(store: Store, key: str, deadline: float, place: Place, timeout_s: float) -> None:
    pause = _FIRST_PAUSE_S
    while not store.check([key]):
        if time.monotonic() >= deadline:
            raise _nobody(place, timeout_s)
        pause = _rest(pause)


def _nobody(place: Place, timeout_s: float) -> RanksError:
    return RanksError(
        f"open: rank {place.rank} met no rank 0 within {timeout_s:g} s: rank 0 did not call open, or cannot be reached "
        f"at {place.address}"
    )


def _rest(pause: float) -> float:
    time.sleep(pause)
    return min(2 * pause, _LONGEST_PAUSE_S)


def _serve(host: str) -> TCPStore:
    return TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S)
    )


def _connect(host: str, port: int) -> TCPStore:
    return TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_S),
    )
