"""The forecast of a day: a golden table of chains, and properties that hold for every chain."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rules import NEWEST_FIRST, retained
from tierfall.core.types.values import LossClass, TierKind, WhenFull
from tierfall.core.types.view import TierRules
from tierfall.plan.day import DayForecast, forecast_day
from tierfall.plan.simulate import SimulatedChain, Workload

GOLDEN = Path(__file__).with_name("forecast.txt")
GB, MB = 10**9, 10**6
HOST = TierRules(name="host", kind=TierKind.HOST, survives=LossClass.PROCESS)


def disk(name: str = "nvme", *, keep: int | None = None, **rules: Any) -> TierRules:
    return TierRules(
        name=name,
        kind=TierKind.FILE,
        survives=LossClass.PROCESS,
        **{"retain": retained(keep), **rules},
    )


def store(*, keep: int | None = None, **rules: Any) -> TierRules:
    return TierRules(
        name="store",
        kind=TierKind.OBJECT,
        survives=LossClass.SITE,
        **{"retain": retained(keep), **rules},
    )


def every(seconds: float, size: int = 9 * GB, **more: int) -> Workload:
    return Workload(image_bytes=size, save_every_s=seconds, **more)


FAST = SimulatedChain(
    rules=(HOST, disk(keep=3), store(flush_every=10, keep=5)),
    rates={"nvme": 3.0 * GB, "store": 0.5 * GB},
    shared=frozenset({"store"}),
)
SLOW = SimulatedChain(rules=(HOST, disk(keep=3)), rates={"nvme": 500.0 * MB}, host_bytes=5 * 7 * GB)


def full(chain: SimulatedChain, host: WhenFull) -> SimulatedChain:
    return replace(chain, rules=(replace(HOST, when_full=host), *chain.rules[1:]))


def far(**rules: Any) -> SimulatedChain:
    """A quick disk, and a store that takes a third of what comes."""
    return SimulatedChain(
        rules=(HOST, disk(keep=2), store(**rules)),
        rates={"nvme": 7.0 * GB, "store": 7 * GB / 30},
        shared=frozenset({"store"}),
        host_bytes=35 * GB,
    )


CASES: dict[str, tuple[SimulatedChain, Workload]] = {
    "a disk and a store that keep up": (FAST, every(600)),
    "the same, saved every 5 s: 17,280 saves": (FAST, every(5, GB)),
    "two tiers that fall behind a little: 2.1 checkpoints an hour": (
        replace(SLOW, rates={"nvme": 7 * GB / 3600 * 6.9}, host_bytes=100 * GB),
        every(400, 7 * GB),
    ),
    "a disk at 500 MB/s against 700 MB/s of images: saves wait": (SLOW, every(10, 7 * GB)),
    "the same, skipped": (full(SLOW, WhenFull.SKIP), every(10, 7 * GB)),
    "the same, superseded": (full(SLOW, WhenFull.SUPERSEDE), every(10, 7 * GB)),
    "a disk that fills, where the oldest makes room": (
        replace(FAST, rules=(HOST, disk(capacity_bytes=1000 * GB), FAST.rules[2])),
        every(60),
    ),
    "a file system with less room than the capacity, and a rule that keeps more": (
        replace(
            FAST,
            rules=(HOST, disk(keep=50, capacity_bytes=1000 * GB, evict_high=0.9, evict_low=0.5)),
            room={"nvme": 300 * GB},
        ),
        every(60),
    ),
    "a disk with room for one, that must keep the newest": (
        replace(FAST, rules=(HOST, disk(capacity_bytes=10 * GB))),
        every(600),
    ),
    "a disk that cannot hold one": (
        replace(FAST, rules=(HOST, disk(capacity_bytes=8 * GB)), max_wait_s=60.0),
        every(3600),
    ),
    "a store whose rate nobody knows, and that keeps all": (
        replace(FAST, rules=(HOST, disk(keep=2), store(flush_every=4)), rates={}),
        every(300),
    ),
    "eight ranks on two nodes, one store": (FAST, every(600, ranks=8, nodes=2)),
    "a store that falls behind, and a disk that keeps what it is owed: nothing waits": (
        far(when_full=WhenFull.SKIP),
        every(10, 7 * GB),
    ),
    "a store that takes the newest first, and keeps two": (
        far(flush_order=NEWEST_FIRST, keep=2),
        every(10, 7 * GB),
    ),
    "a store that is waited for 3 s, and saves are skipped then": (
        replace(far(max_wait_s=3.0), rules=(HOST, store(max_wait_s=3.0))),
        every(10, 7 * GB),
    ),
    "a disk that is full of what the store is owed, which skips": (
        replace(far(), rules=(HOST, disk(capacity_bytes=28 * GB), store(when_full=WhenFull.SKIP))),
        every(10, 7 * GB),
    ),
    "a store that falls behind, and is to be no further behind than a minute": (
        far(within_s=60.0),
        every(10, 7 * GB),
    ),
    "a store that takes the newest first is never a minute behind": (
        far(flush_order=NEWEST_FIRST, within_s=60.0, keep=2),
        every(10, 7 * GB),
    ),
    "memory for one image alone": (replace(FAST, host_bytes=10 * GB), every(60)),
}


def told(made: DayForecast) -> str:
    """A forecast as text that a person can check."""
    lines = [
        f"{made.saves} saves, {made.skipped} skipped, {made.superseded} superseded, waited {made.waited_s:.0f} s, "
        f"played {made.played_s:.0f} s"
    ]
    for tier in made.tiers:
        takes = "?" if tier.copy_s is None else f"{tier.copy_s:.1f} s"
        busy = "?" if tier.busy is None else f"{tier.busy:.3f}"
        full = "never" if tier.full_s is None else f"after {tier.full_s:.0f} s"
        lag = "?" if tier.lag_s is None else f"{tier.lag_s:.1f} s"
        late = "" if tier.late_s is None else f", late after {tier.late_s:.0f} s"
        lines.append(
            f"  {tier.name}: {tier.copy_bytes / GB:g} GB every {tier.every_s:g} s takes {takes}, busy {busy}, behind "
            f"{tier.behind_per_h:.2f}/h, keeps {tier.kept} (most {tier.kept_max}), {tier.bytes / GB:g} GB, full {full}"
            f"{', waits' if tier.waits else ''}, lag {lag}{late}"
        )
        lines += [f"    {reason}" for reason in tier.reasons]
    lines += [f"  {reason}" for reason in made.reasons]
    return "\n".join(lines)


def test_what_a_day_brings_is_as_written() -> None:
    now = "\n\n".join(
        f"## {title}\n{told(forecast_day(chain, load, work_max=200_000))}"
        for title, (chain, load) in CASES.items()
    )
    if os.environ.get("TIERFALL_GOLDEN") == "write":
        GOLDEN.write_text(now + "\n")
    assert now + "\n" == GOLDEN.read_text()


def test_a_day_that_is_too_long_goes_on_as_what_was_played() -> None:
    """The whole day is affordable here; less than half of its work gives the same figures."""
    whole = forecast_day(FAST, every(240, GB), work_max=10**9)
    part = forecast_day(FAST, every(240, GB), work_max=200_000)
    assert whole.played_s == 86_400
    assert part.played_s < 43_200
    assert part.saves == whole.saves == 360
    assert [t.kept for t in part.tiers] == [t.kept for t in whole.tiers]
    assert "were simulated; the rest is extrapolated" in part.reasons[-1]
    assert whole.reasons == ()


def test_what_fills_after_what_was_played_is_foreseen() -> None:
    chain = replace(FAST, rules=(HOST, disk(keep=1), store(capacity_bytes=80 * GB)))
    whole = forecast_day(chain, every(601, GB), work_max=10**9)
    part = forecast_day(chain, every(601, GB), work_max=60_000)
    assert part.played_s < 40_000 < 80 * 600
    full = {made.played_s: made.tiers[2].full_s for made in (whole, part)}
    assert whole.tiers[2].full_s == pytest.approx(part.tiers[2].full_s, rel=0.02), full
    assert whole.tiers[2].kept == part.tiers[2].kept == 80


def test_a_bound_that_is_passed_after_what_was_played_is_foreseen() -> None:
    """What is saved in 30 s takes 45: half an hour is lost in an hour and a half, however little was played."""
    chain = far(within_s=1800.0)
    whole = forecast_day(chain, every(30, int(10.5 * GB)), work_max=800_000)
    part = forecast_day(chain, every(30, int(10.5 * GB)), work_max=60_000)
    assert part.played_s < 2000 < whole.played_s
    late = {made.played_s: made.tiers[2].late_s for made in (whole, part)}
    assert whole.tiers[2].late_s == pytest.approx(5400, rel=0.05), late
    assert part.tiers[2].late_s == pytest.approx(5400, rel=0.05), late


def test_what_goes_up_and_down_has_no_trend() -> None:
    """Between its watermarks a disk of 40 holds 8 to 36 checkpoints, and so it does however little was played."""
    rules = {"capacity_bytes": 40 * GB, "evict_high": 0.9, "evict_low": 0.2}
    chain = replace(FAST, rules=(HOST, disk(**rules)))
    for work_max in range(100_000, 200_000, 20_000):
        made = forecast_day(chain, every(5, GB), work_max=work_max)
        assert made.played_s < 60_000
        nvme = made.tiers[1]
        assert 8 <= nvme.kept <= nvme.kept_max == 36, work_max


@pytest.mark.parametrize("work_max", [1, 10, 100])
def test_however_little_is_played_there_is_an_answer(work_max: int) -> None:
    made = forecast_day(FAST, every(600), work_max=work_max)
    assert made.saves >= 0
    assert 0 <= made.played_s <= 86_400


@st.composite
def chains(draw: st.DrawFn) -> tuple[SimulatedChain, Workload]:
    size = draw(st.integers(1, 20)) * GB
    when_full = draw(st.sampled_from(WhenFull))
    tiers = [replace(HOST, when_full=when_full)]
    rates = {}
    for number in range(draw(st.integers(1, 3))):
        name = f"t{number}"
        capacity = draw(st.one_of(st.none(), st.integers(1, 30)))
        tiers.append(
            replace(
                disk(name),
                flush_every=draw(st.integers(1, 5)),
                flush_order=draw(st.sampled_from([None, NEWEST_FIRST])),
                when_full=draw(st.one_of(st.none(), st.sampled_from(WhenFull))),
                retain=retained(draw(st.one_of(st.none(), st.integers(1, 6)))),
                capacity_bytes=None if capacity is None else capacity * size,
            )
        )
        rates[name] = size / draw(st.floats(0.1, 2000.0))
    chain = SimulatedChain(
        rules=tuple(tiers),
        rates=rates,
        host_bytes=size * draw(st.integers(1, 6)),
        max_wait_s=draw(st.floats(0.1, 600.0)),
    )
    return chain, every(draw(st.floats(20.0, 7200.0)), size)


UP_AND_DOWN = SimulatedChain(
    rules=(HOST, disk("t0"), disk("t1", flush_every=2)),
    rates={"t0": GB / 21, "t1": 1.0 * GB},
    shared=frozenset(),
    host_bytes=GB,
    max_wait_s=1.0,
)
"""Its trend, rounded, would have a tier keep more than is saved."""


@settings(max_examples=25, deadline=None)
@example((UP_AND_DOWN, every(20.0, GB)))
@given(chains())
def test_no_chain_is_filled_beyond_its_bounds_and_nothing_is_lost_count_of(
    case: tuple[SimulatedChain, Workload],
) -> None:
    chain, load = case
    made = forecast_day(chain, load, work_max=20_000)
    assert made.saves + made.skipped <= 86_400 / load.save_every_s + 1
    assert made.superseded <= made.saves
    assert 0 <= made.waited_s <= 86_400
    for rules, tier in zip(chain.rules, made.tiers, strict=True):
        if rules.capacity_bytes is not None:
            assert tier.bytes_max <= rules.capacity_bytes
        assert 0 <= tier.kept <= tier.kept_max
        assert tier.kept <= made.saves
        assert tier.busy is None or (tier.busy > 1) == (tier.behind_per_h > 0)
        if tier.behind_per_h or tier.waits:
            assert tier.reasons
    if chain.rules[0].when_full is WhenFull.SKIP:
        assert made.waited_s == 0
