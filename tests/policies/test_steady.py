"""The steady state of tiers, by numbers that a person can compute."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules import NEWEST_FIRST, best, every_period, every_steps, last, retained, rule
from tierfall.core.types.policy import Rule
from tierfall.core.types.values import LossClass, TierKind, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.plan.steady import Chain, SteadyTier, Workload, steady_state
from tierfall.policies.retention import count_kept

GB, MB = 10**9, 10**6
HOST = TierRules(name="host", kind=TierKind.HOST, survives=LossClass.PROCESS)
DAY_S = 86_400


def disk(**rules: Any) -> TierRules:
    kept = {"retain": retained(3), **rules}
    return TierRules(name="disk", kind=TierKind.FILE, survives=LossClass.PROCESS, **kept)


def state_of(
    tier: TierRules, *, rate: float | None = 500 * MB, load: Workload | None = None, **chain: Any
) -> SteadyTier:
    """A disk with images of 9 GB, one every 600 s, unless a test says otherwise."""
    load = load or Workload(image_bytes=9 * GB, save_every_s=600)
    rates = {} if rate is None else {"disk": rate}
    return steady_state(Chain(rules=(HOST, tier), rates=rates, **chain), load)[1]


# Whether it keeps up ---------------------------------------------------------------------------------


def test_a_tier_that_keeps_up_loses_one_interval_and_a_copy() -> None:
    """9 GB at 500 MB/s take 18 s of 600."""
    made = state_of(disk())
    assert (made.copy_bytes, made.every_s, made.copy_s, made.busy) == (9 * GB, 600, 18, 0.03)
    assert made.lost_s == 618
    assert (made.full_s, made.reasons) == (None, ())


def test_a_tier_that_is_too_slow_falls_behind_by_the_difference() -> None:
    """9 GB at 10 MB/s take 900 s: 4 an hour of 6, at 10 against 15 MB/s."""
    made = state_of(disk(), rate=10 * MB)
    assert (made.busy, made.lost_s) == (1.5, None)
    assert made.reasons == (
        "falls behind by 2 checkpoints an hour: images come at 15 MB/s, and it takes 10 MB/s: save less often, flush "
        "fewer to it (flush.every), or raise its bandwidth",
        "once memory is full of copies that it is owed, when_full decides what saves do: wait",
    )
    skips = state_of(disk(when_full=WhenFull.SKIP), rate=10 * MB)
    assert skips.reasons[1].endswith("saves do: skip")
    newest = state_of(disk(flush_order=NEWEST_FIRST), rate=10 * MB)
    assert newest.reasons[1].endswith("some may never arrive")


def test_ranks_share_their_nodes_rate_and_all_share_a_shared_tier() -> None:
    """Eight ranks on two nodes: four images of a node pass at 500 MB/s, and eight are counted where all see them."""
    load = Workload(image_bytes=9 * GB, save_every_s=600, ranks=8, nodes=2)
    own, shared = state_of(disk(), load=load), state_of(disk(), load=load, shared={"disk"})
    assert (own.copy_s, shared.copy_s) == (72, 72)
    assert (own.copy_bytes, shared.copy_bytes) == (36 * GB, 72 * GB)


# How much it holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "kept", "per_day"),
    [
        ((), 0, 144),
        ((last(3),), 3, 0),
        ((last(3), best("loss", count=2)), 5, 0),
        ((rule("for", 3600.0),), 6, 0),
        ((rule("for", 60.0),), 2, 0),
        ((last(10), rule("for", 3600.0)), 10, 0),
        ((last(3), every_period(DAY_S)), 3, 1),
        ((every_period(60),), 0, 144),
        ((every_steps(1000),), 0, 43.2),
        ((every_period(DAY_S / 2), every_steps(1000)), 0, 45.2),
    ],
)
def test_rules_keep_so_many_and_so_many_more_a_day(
    rules: tuple[Rule, ...], kept: int, per_day: float
) -> None:
    """One every 600 s, and a step every 2 s: 43.2 times a thousand steps a day."""
    found = count_kept(disk(retain=rules), 600, 2.0)
    assert (found[0], found[1], found[2]) == (kept, pytest.approx(per_day), ())


def test_a_tier_holds_what_it_keeps_and_what_arrives() -> None:
    assert state_of(disk()).bytes_max == 4 * 9 * GB
    assert state_of(disk(retain=())).bytes_max is None
    assert state_of(disk(retain=())).reasons == (
        "keeps 144 checkpoints a day for ever, 1.2 TiB, without a bound",
    )


@pytest.mark.parametrize("where", ["capacity", "file system"])
def test_a_tier_with_too_little_room_is_full_and_says_what_to_change(where: str) -> None:
    """It has room for 3 of 4: the fourth, after 2,400 s, finds none."""
    rules = {"capacity_bytes": 30 * GB} if where == "capacity" else {}
    made = state_of(disk(**rules), room={} if rules else {"disk": 30 * GB})
    assert (made.full_s, made.bytes_max) == (2400, 27 * GB)
    (reason,) = made.reasons
    assert reason.startswith(
        "full after 40 min 00 s: then the oldest is deleted for each new one. Its rules keep 3 checkpoints and the one "
        f"that arrives; its {where}"
    )
    assert "has room for 3: " in reason
    assert ("raise capacity" if rules else "use a larger file system") in reason
    assert state_of(disk(capacity_bytes=36 * GB)).full_s is None
