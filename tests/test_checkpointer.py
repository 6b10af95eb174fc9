"""The Checkpointer's promises to a training loop, from the first step to the next start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.core.types.errors import StepError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.core.types.view import Verdict
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]


def commit_in(root: Path, step: int) -> dict[str, Any]:
    (path,) = root.glob(f"run/step-{step:08d}-*/commit.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


class Down:
    """A tier that does not take copies for as long as ``down`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.down = True
        original = StoredTier.create_shard

        def create_shard(tier: StoredTier, *args: Any) -> Any:
            if self.down and tier.name == name:
                raise UnreachableError(f"{name} is down, on purpose")
            return original(tier, *args)

        monkeypatch.setattr(StoredTier, "create_shard", create_shard)


# The loop --------------------------------------------------------------------------------------------


# What goes along -------------------------------------------------------------------------------------


# Looking ---------------------------------------------------------------------------------------------


# A person's orders -----------------------------------------------------------------------------------


def test_a_pinned_step_outlives_retention_and_goes_once_it_is_unpinned(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"retain": {"last": 1}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.pin(1)
        assert [c.pinned for c in ckpt.checkpoints()] == [True]
        for step in (2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.prune()
        assert steps_on(tmp_path / "disk") == [1, 3]
    with tierfall.open(config) as ckpt:
        assert [(c.step, c.pinned) for c in ckpt.checkpoints()] == [(1, True), (3, False)]
        ckpt.unpin(1)
        ckpt.prune()
        assert steps_on(tmp_path / "disk") == [3]


def test_delete_takes_a_step_from_everywhere(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(disk={}, far={})
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        ckpt.delete(2)
        assert [c.step for c in ckpt.checkpoints()] == [1]
        assert steps_on(tmp_path / "disk") == steps_on(tmp_path / "far") == [1]
        with pytest.raises(StepError, match=r"delete: step 2 is not known.*1@1"):
            ckpt.delete(2)
        with pytest.raises(StepError, match="pin: step 1 of attempt 9 is not known"):
            ckpt.pin(1, attempt=9)
        ckpt.pin(1)
        with pytest.raises(StepError, match="unpin it first"):
            ckpt.delete(1)
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (1, 1)


def test_a_dry_run_says_what_a_prune_does_and_does_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(disk={})) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        ckpt.restore(blank())
        wait_until(lambda: len(ckpt.checkpoints()) == 1, "the start has pruned")
        plan = ckpt.prune(dry_run=True)
    assert [(d.tier, d.checkpoint.step, d.verdict) for d in plan] == [("disk", 3, Verdict.KEEP)]
    assert all(d.reason for d in plan)


def test_prune_sees_marks_that_were_left_from_outside(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    from tierfall.backends.posix.backend import PosixBackend
    from tierfall.core.format.records import Mark

    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
        outside = StoredTier(name="disk", run="run", backend=PosixBackend(tmp_path / "disk"))
        outside.add_mark(Mark(name="tombstone", checkpoint=CheckpointId(1, 1), wall_time_s=0.0))
        outside.close()
        assert all(d.verdict is Verdict.KEEP for d in ckpt.prune(dry_run=True))
        assert len(list((tmp_path / "disk/run").glob("step-*/commit.json"))) == 2
        ckpt.prune()
        assert steps_on(tmp_path / "disk") == [2]


# Restoring -------------------------------------------------------------------------------------------


def test_restoring_twice_is_restoring_once(make_config: MakeConfig) -> None:
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    with tierfall.open(config) as ckpt:
        for _ in range(2):
            state = blank()
            report = ckpt.restore(state)
            assert report is not None
            assert (report.step, step_in(state)) == (1, 1)
        assert ckpt.save(2, state_of(2), block=True).attempt == 2


def test_saving_after_a_restore_goes_on_with_line_and_ordinal(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config()
    with tierfall.open(config) as ckpt:
        for step in (10, 20):
            ckpt.save(step, state_of(step), block=True)
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        with pytest.raises(StepError, match="step 20 already"):
            ckpt.save(20, state_of(20))
        ckpt.save(21, state_of(21), block=True)
    commit = commit_in(tmp_path / "disk", 21)
    assert commit["ordinal"] == 3
    assert commit["attempt"] == 2
    assert commit["started_from"] == {"step": 20, "attempt": 1}
    assert commit_in(tmp_path / "disk", 10)["started_from"] is None


def test_going_back_in_the_same_process_takes_a_new_attempt(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        state = blank()
        ckpt.restore(state, step=1)
        assert step_in(state) == 1
        again = ckpt.save(2, state_of(2), block=True)
        assert again.attempt == 2
        ckpt.restore(state)
        assert step_in(state) == 2
        third = ckpt.save(3, state_of(3), block=True)
        assert third.attempt == 3
        live = {f"{c.step}@{c.attempt}" for c in ckpt.checkpoints() if not c.abandoned}
        assert live == {"1@1", "2@2", "3@3"}
    assert commit_in(tmp_path / "disk", 3)["started_from"] == {"step": 2, "attempt": 2}


# Memory ----------------------------------------------------------------------------------------------


def arenas(memory: Path) -> list[Path]:
    return sorted(memory.rglob("*.arena"))


def test_memory_goes_when_all_is_durable_below(make_config: MakeConfig, memory: Path) -> None:
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1))
        assert len(arenas(memory)) == 1
    assert arenas(memory) == []


def test_memory_that_is_owed_stays_and_the_next_start_finishes_it(
    make_config: MakeConfig,
    memory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    down = Down(monkeypatch, "far")
    config = make_config(disk={}, far={}, max_wait="1s")
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1))
        report = ckpt.drain(deadline=0.5)
        assert report.left == ((1, 1, "far"),)
    assert len(arenas(memory)) == 1
    assert any(
        "still owed: 1@1 to far; what is owed is in" in r.getMessage() for r in caplog.records
    )
    down.down = False
    with tierfall.open(config) as ckpt:
        (info,) = ckpt.checkpoints()
        assert CopyState.SEALED in info.tiers.values()
        state = blank()
        report_restore = ckpt.restore(state)
        assert report_restore is not None
        assert {s.tier for s in report_restore.sources} == {"host"}
        assert step_in(state) == 1
        wait_until(lambda: steps_on(tmp_path / "far") == [1], "the copy that was owed is there")
    assert arenas(memory) == []


def test_an_image_that_no_tier_takes_stays_in_memory(make_config: MakeConfig, memory: Path) -> None:
    """The newest step goes to no lower tier: without its memory it would be gone."""
    config = make_config(disk={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    assert len(arenas(memory)) == 1
    with tierfall.open(config) as ckpt:
        state = blank()
        assert ckpt.restore(state) is not None
        assert step_in(state) == 1
        ckpt.save(2, state_of(2), block=True)
    assert arenas(memory) == []


def test_values_that_change_in_length_move_nothing(make_config: MakeConfig, tmp_path: Path) -> None:
    def starts() -> set[int]:
        paths = (tmp_path / "disk/run").glob("step-*/rank-*.json")
        return {json.loads(path.read_text())["data_start"] for path in paths}

    with tierfall.open(make_config()) as ckpt:
        for step, text in enumerate(["", "x" * 100, "y" * 2000, "é" * 500, "z"], start=1):
            state = state_of(step)
            state["note"] = text
            ckpt.save(step, state, block=True)
            assert tierfall.load(tmp_path / "disk", step=step)["note"] == text
        assert len(starts()) == 1
        state["note"] = "long" * 16_000  # more than the slack, and still no blob: a new layout
        ckpt.save(9, state, block=True)
    assert tierfall.load(tmp_path / "disk", step=9)["note"] == "long" * 16_000


def test_memory_grows_when_the_optimizer_state_appears_after_the_first_save(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    model = torch.nn.Linear(100, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    config = make_config()
    del config["tiers"][0]["capacity"]
    with tierfall.open(config) as ckpt:
        small = ckpt.save(1, state, block=True)
        before = ckpt.statistics().host_capacity_bytes
        model(torch.randn(2, 100)).sum().backward()
        optimizer.step()
        large = ckpt.save(2, state, block=True)
        assert large.stats.bytes > 2 * small.stats.bytes - 70_000
        after = ckpt.statistics().host_capacity_bytes
        assert after >= 2 * large.stats.bytes > before  # the next capture need not wait for a flush
    loaded = tierfall.load(tmp_path / "disk", step=2)
    assert torch.equal(
        loaded["optimizer"]["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )


# The end ---------------------------------------------------------------------------------------------
