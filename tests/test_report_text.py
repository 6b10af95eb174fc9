"""What print and a notebook show of reports, handles and a run: lines that a person reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import tierfall
from tierfall.telemetry.report_text import describe_peer_survival
from tierfall.telemetry.reports import DrainReport, Fallback, PeerSurvival, SurvivalChance

MakeConfig = Callable[..., dict[str, Any]]


def state(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((1024,), float(step))}


def test_a_run_its_handles_and_reports_are_shown_as_sentences(make_config: MakeConfig) -> None:
    config = {**make_config(), "interval": {"every": 10}}
    with tierfall.open(config) as ckpt:
        assert "run 'run', attempt 1, on host, disk: nothing saved or restored yet" in repr(ckpt)
        handle = ckpt.save(10, state(10), metrics={"loss": 1.5}, tags=["good"], block=True)
        assert repr(handle) == "<SaveHandle of step 10 (attempt 1): saved, captured, on disk, host>"
        assert "disk: at step 10>" in repr(ckpt)
        assert re.fullmatch(
            r"<SaveStats: [\d.]+ KiB; training blocked .*; captured after [\d.]+ m?s; on disk after .*>",
            repr(handle.stats),
        )
        (decision,) = ckpt.prune(dry_run=True)
        assert re.fullmatch(r"<keep 10@1 on disk \([\d.]+ KiB\): .+>", repr(decision))
        (info,) = ckpt.checkpoints()
        assert repr(info).startswith("<step 10 (attempt 1): ")
        assert " on host, disk; " in repr(info)
        assert repr(info).endswith("tags good; loss 1.5>")
        damaged = replace(info, damage={"disk": "gone"}, owed=("far",), pinned=True)
        assert "owed to far; not good on disk; pinned" in repr(damaged)
        shown = str(ckpt.statistics())
        assert "  saves         1 (0 lazy)\n" in shown
        assert "  survives      step 10 a lost process, " in shown
        assert "  commits       disk 1\n" in shown
        assert "trouble" not in shown
        assert "  trouble       2 failed flushes" in str(
            replace(ckpt.statistics(), flush_failures=2)
        )
        assert repr(ckpt.drain(0)).endswith("  nothing was owed")
    assert repr(ckpt).startswith("<closed Checkpointer of run 'run'")
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state(0))
        assert repr(report).startswith("restored step 10 (attempt 1) in ")
        assert repr(report).endswith(" from disk")
        skipped = Fallback(what="step 11", reason="damaged everywhere")
        assert report is not None
        shown = str(replace(report, fallbacks=(skipped,)))
        assert shown.endswith("\n  skipped step 11: damaged everywhere")


def test_a_drain_names_what_is_left() -> None:
    report = DrainReport(done=((1, 1, "disk"),), left=((2, 1, "disk"), (2, 1, "far")), seconds=1.5)
    assert (
        repr(report) == "drained in 1.5 s\n  durable: 1@1 to disk\n  left: 2@1 to disk, 2@1 to far"
    )


def chance(losses: int, probability: float, *, exact: bool = True) -> SurvivalChance:
    return SurvivalChance(losses=losses, probability=probability, exact=exact)


@pytest.mark.parametrize(
    ("certain", "chances", "text"),
    [
        (1, [chance(1, 1), chance(2, 14 / 15), chance(3, 0.8)],
         "the loss of any 1 node; of 2 with 93.3%, of 3 with 80%"),
        (2, [chance(1, 1), chance(2, 1), chance(3, 1 - 1e-15)],
         "the loss of any 2 nodes; of 3 with 99.9%"),
        (1, [chance(1, 1), chance(2, 0.61, exact=False), chance(3, 0, exact=False)],
         "the loss of any 1 node; of 2 with at least 61%"),
        (1, [chance(1, 1), chance(2, 0)], "the loss of any 1 node"),
        (0, [chance(1, 0)], "no loss of a node for certain"),
    ],
)  # fmt: skip
def test_losses_of_nodes_are_never_rounded_up(
    certain: int, chances: list[SurvivalChance], text: str
) -> None:
    found = PeerSurvival(
        tier="peers", step=1200, attempt=3, certain=certain, chances=tuple(chances)
    )
    assert describe_peer_survival(found) == f"peers: 1200@3 survives {text}"


def test_statistics_have_a_line_about_peer_memory(make_config: MakeConfig) -> None:
    found = PeerSurvival(tier="peers", step=7, attempt=1, certain=1, chances=(chance(1, 1),))
    with tierfall.open(make_config()) as ckpt:
        statistics = ckpt.statistics()
    assert statistics.peer_survival is None
    assert "peer memory" not in str(statistics)
    shown = str(replace(statistics, peer_survival=found))
    assert "  peer memory   peers: 7@1 survives the loss of any 1 node\n" in shown


def test_dir_of_a_handle_has_the_public_names(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state(1))
        shown = {name for name in dir(handle) if not name.startswith("_")}
    assert {"step", "attempt", "tiers", "outcome", "stats", "captured", "wait", "done"} <= shown
    assert "add_done_callback" in shown
    assert not {name for name in shown if name.startswith(("on_", "add_blocked"))}
