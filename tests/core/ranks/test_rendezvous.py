"""Ranks as processes meet through a store, reach each other through their own stores, and leave nothing behind."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests import forked
from tests.core.ranks.processes import PATIENCE_S, Process, serve
from tierfall.core.ranks import rendezvous
from tierfall.core.ranks.rendezvous import RankPlacement, connect, join
from tierfall.core.types.errors import RanksError

ADDRESS = "tierfall/run/address"
NODES = "abab"
MakeRank = Callable[..., Process]


@pytest.fixture
def bootstrap() -> TCPStore:
    return serve()


@pytest.fixture
def make_rank(bootstrap: TCPStore) -> Iterator[MakeRank]:
    """``make_rank(2)``: the process of rank 2 of 4, on two nodes: 0 and 2, 1 and 3."""
    made: list[Process] = []

    def make(rank: int, *, nodes: str = NODES, **more: Any) -> Process:
        made.append(Process(rank, len(nodes), nodes[rank], bootstrap.port, **more))
        return made[-1]

    yield make
    for process in made:
        process.end()


@pytest.fixture
def ranks(make_rank: MakeRank) -> list[Process]:
    return [make_rank(rank) for rank in range(len(NODES))]


def all_do(ranks: list[Process], *what: Any) -> list[Any]:
    for rank in ranks:
        rank.ask(*what)
    return [rank.result() for rank in ranks]


def meet(ranks: list[Process]) -> None:
    assert all_do(ranks, "join", PATIENCE_S) == [((0, 2), (1, 3))] * 4


def agreed(ranks: list[Process], body: Any = "x") -> bool:
    answers = all_do(ranks, "agree", "open", body, PATIENCE_S)
    return (
        answers == [[[rank, body] for rank in range(4)]] * 3 + [answers[3]]
        and answers[3] == (answers[0])
    )


def see_gone(ranks: list[Process]) -> None:
    for rank in ranks:
        assert rank.do("threads") == []
        assert rank.do("ports") == []


def test_ranks_meet_agree_and_leave_nothing_behind_again_and_again(ranks: list[Process]) -> None:
    """Whoever is first to come again finds the door of the time before, and its store perhaps alive. A message may be
    larger than a store takes: 10 MiB come from a node, 20 go to all."""
    for body in ({"y": [1, None, 2.5]}, "x" * (5 << 20)):
        meet(ranks)
        assert agreed(ranks, body)
        assert all_do(ranks, "close", PATIENCE_S) == [None] * 4
    see_gone(ranks)
    meet(ranks)
    assert agreed(ranks)
    assert [len(rank.do("ports")) for rank in ranks] == [1, 1, 0, 0]  # rank 0, and a leader
    assert [len(rank.do("threads")) for rank in ranks] == [1, 2, 1, 1]
    began = time.monotonic()
    assert all_do(ranks, "close", PATIENCE_S) == [None] * 4
    assert time.monotonic() - began < PATIENCE_S / 4
    see_gone(ranks)


def test_ranks_that_meet_again_do_not_connect_to_the_store_of_the_time_before(
    bootstrap: TCPStore, ranks: list[Process]
) -> None:
    """It may be closing: a connection to it would be held."""
    meet(ranks)
    assert all_do(ranks, "close", PATIENCE_S) == [None] * 4
    port = json.loads(bootstrap.get(ADDRESS))["port"]
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.setblocking(False)
        for rank in ranks[1:]:
            rank.ask("join", PATIENCE_S)
        time.sleep(0.3)
        ranks[0].ask("join", PATIENCE_S)
        assert [rank.result() for rank in ranks] == [((0, 2), (1, 3))] * 4
        with pytest.raises(BlockingIOError):
            listening.accept()


def test_a_door_where_this_rank_was_before_is_not_taken_for_a_new_one(
    ranks: list[Process], make_rank: MakeRank
) -> None:
    """The ranks of the earlier start are alive, and their store still says welcome."""
    meet(ranks)
    again = [make_rank(rank) for rank in range(4)]
    for rank in again[1:]:
        rank.ask("join", PATIENCE_S)
    time.sleep(0.5)  # they knock where they must not be let in
    again[0].ask("join", PATIENCE_S)
    assert [rank.result() for rank in again] == [((0, 2), (1, 3))] * 4
    assert agreed(again)
    assert agreed(ranks)


@pytest.mark.parametrize("alive", [False, True])
def test_the_door_of_a_start_that_is_gone_or_never_welcomes(
    bootstrap: TCPStore, ranks: list[Process], alive: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    stale = serve() if alive else None
    door = {"name": "tierfall/old", "host": "127.0.0.1", "port": stale.port if stale else port}
    bootstrap.set(ADDRESS, json.dumps(door))
    for rank in ranks[1:]:
        rank.ask("join", PATIENCE_S)
    if stale is None:
        time.sleep(0.3)
    else:
        stale.wait([f"tierfall/old/rank/{rank}" for rank in (1, 2, 3)])  # they are all there
    began = time.monotonic()
    ranks[0].ask("join", PATIENCE_S)
    assert [rank.result() for rank in ranks] == [((0, 2), (1, 3))] * 4
    assert time.monotonic() - began < rendezvous.LOOK_AGAIN_S + 5
    assert agreed(ranks)


def test_ranks_that_never_come_are_named_by_all_that_came(ranks: list[Process]) -> None:
    began = time.monotonic()
    for error in all_do([ranks[0], ranks[2]], "join", 3.0):
        assert isinstance(error, RanksError)
        assert str(error) == "open: ranks 1, 3 did not call open within 3 s"
    assert time.monotonic() - began < PATIENCE_S / 2
    see_gone(ranks)


def test_the_death_of_rank_0_is_reported_to_every_rank_soon(ranks: list[Process]) -> None:
    """Also to those that reach it through the leader of their node only."""
    meet(ranks)
    for rank in ranks[1:]:
        rank.ask("agree", "restore", None, PATIENCE_S)
    time.sleep(0.2)  # they wait for it
    began = time.monotonic()
    ranks[0].kill()
    for rank in ranks[1:]:
        error = rank.result()
        assert isinstance(error, RanksError)
        assert "restore: rank" in str(error)
        assert "the other ranks cannot be reached" in str(error)
        assert "rank 0 hung up" in str(error)
        assert isinstance(rank.do("check"), RanksError)
    assert time.monotonic() - began < PATIENCE_S / 3
    assert all_do(ranks[1:], "close", PATIENCE_S) == [None] * 3
    assert time.monotonic() - began < PATIENCE_S / 2
    see_gone(ranks[1:])


EXIT = """
import sys
from tests.core.ranks.processes import _Worker
from tierfall.core.types.errors import RanksError
from tierfall.core.ranks.rendezvous import RankPlacement
rank, port, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
place = RankPlacement(rank=rank, world_size=2, node=str(rank), address="127.0.0.1", settings={})
worker = _Worker(place, port)
worker.join(30.0)
worker.agree("open", rank, 30.0)
print("met", flush=True)
sys.stdin.read()
if how == "killed":
    try:
        worker.agree("restore", rank, 30.0)
    except RanksError:
        print("told", flush=True)
"""


@pytest.mark.parametrize("how", ["killed", "unclosed"])
def test_a_process_that_never_closed_ends_without_a_crash(bootstrap: TCPStore, how: str) -> None:
    """After the death of rank 0; and while both end at once, with threads that wait for each other's messages."""
    processes = [
        forked.start(["-c", EXIT, str(rank), str(bootstrap.port), how]) for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"met\n"
        if how == "killed":
            processes[0].kill()
        answers = [process.communicate(PATIENCE_S)[0] for process in processes[::-1]]
        assert answers[0] == ("told\n" if how == "killed" else "")
        codes = [process.returncode for process in processes]
        assert codes == ([-9, 0] if how == "killed" else [0, 0])
    finally:
        for process in processes:
            process.kill()
            process.close()


def test_a_meeting_place_that_is_gone_is_a_ranks_error() -> None:
    bootstrap = serve()
    store = connect("127.0.0.1", bootstrap.port)
    del bootstrap
    place = RankPlacement(rank=1, world_size=2, node="a", address="127.0.0.1", settings={})
    with pytest.raises(RanksError, match="the store where the ranks of this job look for each oth"):
        join(place, store, run="run", timeout_s=1.0)
