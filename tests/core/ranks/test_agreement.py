"""All ranks come to one decision, or each learns which rank is missing and why. One thread is one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.core.ranks.threads import network, on_all
from tests.steps import wait_until
from tierfall.core.ranks import agreement as together_module
from tierfall.core.ranks.message_tree import Bodies
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types.errors import (
    RanksError,
)

PATIENCE_S = 20.0
SHORT_S = 0.5
Call = Callable[[Ranks], Any]


class World:
    """Ranks on nodes; ``run`` makes a call on each of them at once, and gives what each returned or raised."""

    def __init__(self, ranks: list[Ranks]) -> None:
        self.ranks = ranks

    def run(self, calls: dict[int, Call]) -> dict[int, Any]:
        outcomes = on_all(partial(call, self.ranks[rank]) for rank, call in calls.items())
        return dict(zip(calls, outcomes, strict=True))


@contextmanager
def world_of(nodes: Sequence[object]) -> Iterator[World]:
    with network(nodes, fan_out=1) as ranks:
        yield World(ranks)


@pytest.fixture
def world() -> Iterator[World]:
    """Seven ranks on three nodes in a line: 0 1 <- 2 3 4 <- 5 6."""
    with world_of("aabbbcc") as world:
        yield world


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together_module, "ANSWER_S", 1.0)


def total(bodies: Bodies) -> Any:
    return sum(bodies.values())


def agree(
    what: str = "open", body: Any = 1, decide: Callable[[Bodies], Any] = total, **more: float
) -> Call:
    return lambda ranks: ranks.agree(what, body, decide, object, **more)


def all_but(world: World, *missing: int) -> list[int]:
    return [rank for rank in range(len(world.ranks)) if rank not in missing]


@pytest.mark.parametrize("node_of", ["a", "aaaa", "abcd", "aabbbcc", "abab"])
def test_every_rank_gets_what_rank_0_decides_of_what_all_brought(node_of: str) -> None:
    seen: list[Bodies] = []

    def decide(bodies: Bodies) -> Any:
        seen.append(bodies)
        return {"number": len(seen), "of": sum(bodies.values())}

    with world_of(node_of) as world:
        for number in range(1, 6):
            results = world.run({rank: agree(body=rank, decide=decide) for rank in all_but(world)})
            assert seen[number - 1 :] == [{rank: rank for rank in all_but(world)}]
            value = {"number": number, "of": sum(all_but(world))}
            assert results == dict.fromkeys(all_but(world), value)


@pytest.mark.parametrize("missing", [[2, 6], [1, 2, 3, 4, 5, 6]], ids=str)
def test_ranks_that_do_not_come_are_named_and_no_others(world: World, missing: list[int]) -> None:
    """Also those below another leader, also where that leader is one of them."""
    came = all_but(world, *missing)
    results = world.run({rank: agree(timeout_s=SHORT_S) for rank in came})
    named = ", ".join(map(str, missing))
    for rank in came:
        assert isinstance(results[rank], RanksError)
        assert f"{named} did not call open within {SHORT_S:g} s" in str(results[rank])


def test_a_rank_that_makes_another_call_is_named_everywhere(world: World) -> None:
    calls = {rank: agree() for rank in all_but(world, 3, 5, 6)}
    results = world.run({**calls, 3: agree("restore"), 6: agree("restore"), 5: agree("close")})
    for rank in all_but(world):
        assert isinstance(results[rank], RanksError)
        assert "ranks 3, 6 called restore where rank 0 called open" in str(results[rank])


def test_rank_0_that_does_not_come_is_named_by_the_others(world: World) -> None:
    results = world.run({rank: agree(timeout_s=SHORT_S) for rank in all_but(world, 0)})
    for rank in all_but(world, 0):
        assert isinstance(results[rank], RanksError)
        assert f"open: rank {rank}: rank 0 gave no answer within {SHORT_S + 1:g} s" in str(
            results[rank]
        )


def test_a_rank_0_that_comes_after_the_others_gave_up_waits_for_their_next_call(
    world: World,
) -> None:
    first = world.run({rank: agree("open", timeout_s=0.0) for rank in all_but(world, 0)})
    assert all(isinstance(first[rank], RanksError) for rank in all_but(world, 0))
    root = world.ranks[0].message_tree
    wait_until(lambda: len(root.missing((together_module.AGREE, 0))) == 7, "they took it back")
    late = world.run({0: agree("open", timeout_s=SHORT_S)})
    why = f"did not call open within {SHORT_S:g} s, or gave it up before rank 0 called it"
    assert str(late[0]) == f"open: ranks 1, 2, 3, 4, 5, 6 {why}"
    results = world.run({rank: agree("restore", body=2) for rank in all_but(world)})
    assert results == dict.fromkeys(all_but(world), 14)


def test_what_ranks_say_last_counts_though_they_gave_up(world: World) -> None:
    """As at a close: they are gone."""
    first = world.run({r: agree("close", timeout_s=0.0, is_last=True) for r in all_but(world, 0)})
    assert all(isinstance(first[rank], RanksError) for rank in all_but(world, 0))
    assert world.run({0: agree("close", decide=lambda bodies: len(bodies))}) == {0: 7}


@pytest.mark.parametrize("alone", [0, 4])
def test_a_call_that_one_rank_makes_alone_does_not_put_later_ones_out_of_step(
    world: World, alone: int
) -> None:
    """With calls of the same name, and of another."""
    for lonely, then in (("pin", "pin"), ("pin", "unpin")):
        given_up = world.run({alone: agree(lonely, timeout_s=0.1)})
        assert isinstance(given_up[alone], RanksError)
        for body in range(2):
            results = world.run({rank: agree(then, body=body) for rank in all_but(world)})
            assert results == dict.fromkeys(all_but(world), 7 * body)


def test_an_answer_that_comes_after_a_rank_gave_up_is_not_taken_for_one_to_its_next_call(
    world: World,
) -> None:
    all_gave_up = threading.Barrier(len(world.ranks))

    def decide_late(bodies: Bodies) -> Any:
        all_gave_up.wait(PATIENCE_S)
        return "late"

    def one_after_the_other(ranks: Ranks) -> Any:
        with pytest.raises(RanksError, match="rank 0 gave no answer"):
            agree("open", timeout_s=0.0)(ranks)
        all_gave_up.wait(PATIENCE_S)
        return agree("restore")(ranks)

    def rank_0(ranks: Ranks) -> Any:
        assert agree("open", decide=decide_late)(ranks) == "late"
        return agree("restore")(ranks)

    results = world.run({0: rank_0, **dict.fromkeys(all_but(world, 0), one_after_the_other)})
    assert results == dict.fromkeys(all_but(world), 7)
