"""The figures of a run: what they count, that the page has each, and when a run is healthy.

``python -m tests.test_metrics`` writes the tables of docs/metrics.md.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierfall.core.types import events
from tierfall.core.types.values import CheckpointId, SaveOutcome, TierKind
from tierfall.telemetry import status as health
from tierfall.telemetry.figures import (
    FIGURES,
    EventTally,
    Figure,
    Statistics,
    to_metrics,
)
from tierfall.telemetry.status import Status, broken_promises, durable_bound_s

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


# The page --------------------------------------------------------------------------------------------


def table(figures: list[Figure]) -> str:
    rows = [
        f"| `{x.name}` |{(x.per and f' `{x.per}`') or ''} | {x.unit} | {x.about} |" for x in figures
    ]
    return "\n".join(["| name | one per | unit | what it is |", "|---|---|---|---|", *rows, ""])


def with_tables(page: str) -> str:
    """Return the page with the tables of all figures in its sections of counters and gauges."""
    for section, is_gauge in (("Counters", False), ("Gauges", True)):
        shown = [figure for figure in FIGURES.values() if (figure.counts is None) == is_gauge]
        before, heading, rest = page.partition(f"\n## {section}\n")
        text, mark, after = rest.partition("\n## ")
        page = before + heading + text[: text.index("| name |")] + table(shown) + mark + after
    return page


def test_the_page_has_the_tables_of_all_figures() -> None:
    assert with_tables(PAGE.read_text()) == PAGE.read_text(), "run python -m tests.test_metrics"
    assert len(FIGURES) > 40


def test_every_reason_is_on_the_page() -> None:
    table = PAGE.read_text().partition("\n## /healthz\n")[2].partition("\n## ")[0]
    parts = [row.split("...") for row in re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)]
    reasons = broken_promises(unhealthy(), 0.0)
    reasons += broken_promises(status_of(), 99.0)
    reasons.append("run x: no trainer of it is alive on this machine")
    for each in parts:
        assert any(all(p in reason for p in each) for reason in reasons), each
    assert len(parts) == len(reasons)


# Counting --------------------------------------------------------------------------------------------


def test_every_counter_is_counted_or_read_elsewhere() -> None:
    id, tally = CheckpointId(1, 1), EventTally(["t"])
    copy: dict[str, Any] = {"at_s": 1.0, "id": id, "tier": "t"}
    for event in (
        events.SaveBegun(at_s=1.0, id=id, bytes=7, lazy_bytes=3, tiers=("t",)),
        events.Captured(at_s=1.0, id=id, bytes=7, seconds=2.0, blocked_s=0.5, lazy=True),
        *(
            events.SaveEnded(at_s=1.0, id=id, outcome=outcome, reason="")
            for outcome in (SaveOutcome.SKIPPED, SaveOutcome.SUPERSEDED, SaveOutcome.FAILED)
        ),
        events.Committed(**copy, bytes=8, seconds=3.0),
        events.FlushDone(**copy, bytes=7, seconds=1.0, sources={"h": 7}),
        events.FlushFailed(**copy, reason="", seconds=1.0),
        events.FlushStalled(**copy, reason="", again_s=1.0),
        events.FlushGivenUp(**copy, reason=""),
        events.SetAside(**copy, reason=""),
        events.Dropped(**copy, bytes=8, reason="", seconds=1.0, unfinished=False),
        events.Dropped(**copy, bytes=8, reason="", seconds=1.0, unfinished=True),
        events.Evicted(**copy, bytes=8, reason=""),
        events.StateRestored(at_s=1.0, id=id, bytes=7, seconds=4.0, sources={"t": 7}, fallbacks=()),
        events.OperationFailed(at_s=1.0, doing="", reason=""),
        events.TierRecovered(at_s=1.0, tier="t"),
    ):
        tally.add(event)
    found = tally.read()
    counters = {name for name, figure in FIGURES.items() if figure.counts is not None}
    assert counters - {name for name, value in found.items() if value} == {
        *("edge_bytes", "late", "lost_events", "unread_events"),
    }
    assert found["blocked_seconds"] == tally.last_blocked_s == 0.5
    assert (found["saves"], found["lazy_saves"], found["failed_saves"]) == (1, 1, 1)
    assert (found["flush_failures"], found["deleted_copies"]) == ({"t": 2}, {"t": 1})
    assert found["restored_bytes"] == {"t": 7}
    assert (tally.committed_s("t"), tally.committed_s("other")) == (1.0, None)


# Health ----------------------------------------------------------------------------------------------


def status_of(failure: str | None = None, **figures: Any) -> Status:
    return Status(
        run="x",
        tiers={"disk": TierKind.FILE},
        checkpoints=(),
        checkpoints_known=0,
        wall_time_s=0.0,
        pid=1,
        start_ticks=None,
        node="n",
        slot=0,
        rank=0,
        world_size=1,
        attempt=1,
        statistics=Statistics(**figures),
        failure=failure,
    )


def unhealthy() -> Status:
    """A status in which each promise is broken."""
    return status_of(
        failing={"disk": "it hangs"},
        failure="KeyError",
        behind_seconds={"disk": 100.0},
        behind_bound_seconds={"disk": 99.0},
        degraded_copies={"disk": 2},
        durable_age_seconds=61.0,
        durable_bound_seconds=60.0,
    )


HEALTHY: dict[str, Any] = {
    "behind_seconds": {"disk": 99.0},
    "behind_bound_seconds": {"disk": 99.0},
    "degraded_copies": {"disk": 0},
    "durable_age_seconds": 60.0,
    "durable_bound_seconds": 60.0,
    "failing": {"disk": ""},
}


def test_a_run_within_its_bounds_is_healthy_and_so_is_one_without_any() -> None:
    assert broken_promises(status_of(**HEALTHY), 0.0) == []
    assert (
        broken_promises(status_of(durable_age_seconds=1e9, behind_seconds={"disk": 1e9}), 0.0) == []
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"behind_seconds": {"disk": 99.5}},
            "tier disk is 1 min 40 s behind; flush.within is 1 min 39 s",
        ),
        ({"degraded_copies": {"disk": 1}}, "tier disk lacks 1 good copies"),
        (
            {"durable_age_seconds": 61.0},
            "no tier got a checkpoint for 1 min 01 s; at most 1 min 00 s are",
        ),
        ({"failing": {"disk": "no space"}}, "tier disk does not accept copies: no space"),
        ({"failure": "KeyError"}, "nothing is flushed any more: KeyError"),
    ],
)
def test_each_broken_promise_is_a_reason(change: dict[str, Any], reason: str) -> None:
    (found,) = broken_promises(status_of(**{**HEALTHY, **change}), 0.0)
    assert found.startswith(reason)


def test_an_old_status_is_a_reason_and_its_ages_go_on() -> None:
    reasons = broken_promises(status_of(**HEALTHY), health.HANGS_AFTER_S + 1)
    assert [reason.split()[:3] for reason in reasons] == [
        ["the", "status", "is"],
        ["tier", "disk", "is"],
        ["no", "tier", "got"],
    ]


@pytest.mark.parametrize(
    ("every_s", "flush_every", "bound_s"),
    [
        (600.0, [1, 4], 1200.0),
        (600.0, [4, 10], 4800.0),
        (0.5, [1], health.DURABLE_LEAST_S),
        (None, [1], None),
        (600.0, [], None),
    ],
)
def test_the_bound_is_twice_the_interval_of_the_tier_that_gets_most(
    every_s: float | None, flush_every: list[int], bound_s: float | None
) -> None:
    assert durable_bound_s(every_s, flush_every) == bound_s


def test_what_is_not_known_or_not_finite_is_left_out() -> None:
    known = Statistics(
        behind={"a": math.inf, "b": 1.5, "c": None}, ettr=math.nan, image_bytes=3, failing={"a": ""}
    )
    found = to_metrics(known)
    assert {
        key: value for key, value in found.items() if FIGURES[key.split("/")[1]].counts is None
    } == {
        "tierfall/image_bytes": 3,
        "tierfall/behind/b": 1.5,
        "tierfall/failing/a": 0,
    }
    assert to_metrics(replace(known, failing={"a": "no space"}))["tierfall/failing/a"] == 1


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
