"""Measured rates of tiers: with parallel copies, throttling and failures in between."""

from __future__ import annotations

import pytest

from tierfall.core.flush.rates import STRETCHES, TierThroughput
from tierfall.core.flush.tasks import (
    AbortShard,
    CopyRun,
    CopySource,
    FinishCopy,
    Outcome,
)
from tierfall.core.types.errors import UnreachableError
from tierfall.core.types.values import CheckpointId, Shard

MIB = 1 << 20
TO_PFS = "pfs"


def run_of(number: int, *, source: str = "host") -> CopyRun:
    return CopyRun(
        tier=TO_PFS,
        id=CheckpointId(1, 1),
        shard=Shard(0, 1),
        number=number,
        first=number,
        stop=number + 1,
        start=number * MIB,
        end=(number + 1) * MIB,
        source=CopySource(tier=source),
        manifest=None,
        writer=None,  # type: ignore[arg-type]
    )


def finish() -> FinishCopy:
    return FinishCopy(
        tier=TO_PFS,
        id=CheckpointId(1, 1),
        shard=Shard(0, 1),
        writer=None,  # type: ignore[arg-type]
        manifest=None,  # type: ignore[arg-type]
        commit=None,  # type: ignore[arg-type]
    )


def bring(
    rates: TierThroughput,
    at_s: float,
    *,
    workers: int,
    seconds: float,
    paced_s: float = 0.0,
    read_s: float = 0.0,
) -> None:
    """Bring a run by each of so many workers at once, and end the copy."""
    runs = [run_of(number, source="nvme" if read_s else "host") for number in range(workers)]
    for run in runs:
        rates.on_begun(run, at_s)
    for run in runs:
        messages = Outcome(task=run, seconds=seconds, throttled_s=paced_s, read_s=read_s)
        rates.on_ended(messages, at_s + seconds)
    rates.on_begun(finish(), at_s + seconds)
    rates.on_ended(Outcome(task=finish()), at_s + seconds)


def test_waits_for_a_pace_do_not_make_a_tier_slow_but_what_comes_is_less() -> None:
    rates = TierThroughput()
    bring(rates, 0.0, workers=1, seconds=10.0, paced_s=9.0)
    assert rates.write_bytes_per_s("pfs") == pytest.approx(MIB)
    assert rates.delivered_bytes_per_s("pfs") == pytest.approx(MIB / 10)


def test_a_pace_never_lowers_what_was_measured_without_one_but_a_slower_tier_does() -> None:
    rates = TierThroughput()
    bring(rates, 0.0, workers=4, seconds=1.0)  # four at once bring four times as much
    for number in range(3 * STRETCHES):
        bring(rates, 10.0 * (number + 1), workers=1, seconds=2.0, paced_s=1.0)
    assert rates.write_bytes_per_s("pfs") == pytest.approx(4 * MIB)
    for number in range(STRETCHES):  # the pace holds nobody up any more
        bring(rates, 1000.0 + 10.0 * number, workers=1, seconds=5.0)
    assert rates.write_bytes_per_s("pfs") == pytest.approx(MIB / 5)
    assert rates.delivered_bytes_per_s("pfs") == pytest.approx(MIB / 5)


def test_what_failed_says_nothing_and_is_not_counted_on() -> None:
    rates = TierThroughput()
    run = run_of(0)
    rates.on_begun(run, 0.0)
    rates.on_ended(Outcome(task=run, error=UnreachableError("on purpose")), 60.0)
    assert rates.write_bytes_per_s("pfs") is None
    abort = AbortShard(tier=TO_PFS, id=CheckpointId(1, 1), writer=None)  # type: ignore[arg-type]
    rates.on_begun(abort, 60.0)
    rates.on_ended(Outcome(task=abort, seconds=5.0), 65.0)
    bring(rates, 100.0, workers=1, seconds=1.0)
    assert rates.write_bytes_per_s("pfs") == pytest.approx(MIB)
    assert rates.delivered_bytes_per_s("pfs") == pytest.approx(MIB)
