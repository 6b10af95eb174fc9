"""The Checkpointer's promises to a training loop, from the first step to the next start."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierfall
from tests.steps import blank, state_of, step_in, steps_on, wait_until
from tierfall.core.types.errors import FlushError, StepError, UnreachableError
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, SaveOutcome
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


def train(config: dict[str, Any], steps: int, losses: list[float]) -> int:
    """The loop of the README; returns where it began."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 16)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3)
    with tierfall.open(config) as ckpt:
        state = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "extra": {"epoch": 0},
        }
        report = ckpt.restore(state)
        start = report.step + 1 if report else 0
        for step in range(start, steps):
            loss = model(torch.randn(4, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["extra"]["epoch"] = step
            losses.append(loss.item())
            ckpt.maybe_save(step, state, metrics={"loss": loss})
    return start


def test_a_run_that_is_interrupted_and_goes_on_is_the_run_that_was_not(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    whole: list[float] = []
    train({**make_config(whole={}, run="whole"), "interval": {"every": 4}}, 12, whole)
    interval = {"every": 4, "at_end": False}  # as if it were killed
    config = {**make_config(disk={}, far={"flush": {"every": 2}}), "interval": interval}
    parts: list[float] = []
    assert train(config, 10, parts) == 0
    assert parts == whole[:10]
    del parts[9:]
    assert train(config, 12, parts) == 9
    assert parts == whole
    assert [p.name for p in sorted((tmp_path / "disk/run").glob("step-*"))] == [
        "step-00000004-a0001",
        "step-00000008-a0001",
    ]
    assert [p.name for p in (tmp_path / "far/run").glob("step-*")] == ["step-00000008-a0001"]


def test_maybe_save_asks_the_cadence(make_config: MakeConfig, tmp_path: Path) -> None:
    with tierfall.open({**make_config(), "interval": {"every": 3}}) as ckpt:
        handles = [ckpt.maybe_save(step, state_of(step)) for step in range(8)]
    assert [handle.step for handle in handles if handle is not None] == [3, 6]
    assert steps_on(tmp_path / "disk") == [3, 6, 7]  # and close saves the last step


def test_block_returns_when_the_last_tier_of_this_step_has_it(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(disk={}, far={"flush": {"every": 2}})) as ckpt:
        first = ckpt.save(1, state_of(1), block=True)
        assert first.tiers == ("disk",)
        assert steps_on(tmp_path / "disk") == [1]
        second = ckpt.save(2, state_of(2), block=True)
        assert second.tiers == ("disk", "far")
        assert second.done("far")
        assert steps_on(tmp_path / "far") == [2]


def test_a_handle_may_be_waited_on_by_any_thread(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        handle = ckpt.save(1, state_of(1))
        thread = threading.Thread(target=handle.wait)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert handle.done()


# What goes along -------------------------------------------------------------------------------------


def test_metrics_may_be_tensors_with_a_graph_and_any_float(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    metrics = {
        "loss": weight * 2,
        "half": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": 7,
        "bad": float("nan"),
        "worse": torch.tensor(float("inf")),
    }
    with tierfall.open(make_config()) as ckpt:
        ckpt.save(1, state_of(1), metrics=metrics, block=True)
        (info,) = ckpt.checkpoints()
    config = make_config()
    with tierfall.open(config) as ckpt:
        (after,) = ckpt.checkpoints()
    for messages in (info.metrics, after.metrics):
        assert messages["loss"] == 4.0
        assert messages["half"] == 0.5
        assert messages["count"] == 7
        assert math.isnan(messages["bad"])
        assert messages["worse"] == math.inf


def test_a_metric_is_read_when_it_is_given(make_config: MakeConfig) -> None:
    """A running loss is set to 0 right after the save; a lazy capture, and the save of the last step, come later."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {**make_config(), "interval": {"every": 2, "at_end": True}}
    with tierfall.open(config) as ckpt:
        for step in range(1, 6):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            with torch.inference_mode():
                inferred = torch.tensor(2.5)
            given = {
                "tensor": torch.tensor(2.5),
                "parameter": torch.nn.Parameter(torch.tensor(2.5)),
                "inferred": inferred,
                "array": np.array(2.5),
            }
            fixed = {"scalar": np.float32(2.5), "flag": np.bool_(True), "truth": True}
            ckpt.maybe_save(
                step, {"model": model, "optimizer": optimizer}, metrics={**given, **fixed}
            )
            with torch.inference_mode():
                for value in given.values():
                    value *= 0
        assert ckpt.statistics().lazy_saves == 1
    wanted = dict.fromkeys((*given, "scalar"), 2.5) | {"flag": 1.0, "truth": 1.0}
    with tierfall.open(config) as ckpt:
        messages = {info.step: dict(info.metrics) for info in ckpt.checkpoints()}
    assert messages == {2: wanted, 4: wanted, 5: wanted}


def test_tags_and_metrics_stand_in_every_commit_record(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config(disk={}, far={})) as ckpt:
        ckpt.save(1, state_of(1), metrics={"loss": 0.5}, tags=("best", "v2"), block=True)
        (info,) = ckpt.checkpoints()
    assert info.tags == ("best", "v2")
    for name in ("disk", "far"):
        commit = commit_in(tmp_path / name, 1)
        assert commit["tags"] == ["best", "v2"]
        assert commit["metrics"] == {"loss": 0.5}


# Looking ---------------------------------------------------------------------------------------------


def test_checkpoints_tell_where_what_lies_and_why_it_matters(make_config: MakeConfig) -> None:
    with tierfall.open(make_config(disk={}, far={"flush": {"every": 2}})) as ckpt:
        assert ckpt.checkpoints() == []
        for step in (10, 20):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
        first, second = ckpt.checkpoints()
        assert (first.step, first.attempt, first.ordinal) == (10, 1, 1)
        assert dict(first.tiers) == {"host": CopyState.SEALED, "disk": CopyState.COMMITTED}
        assert (second.step, second.ordinal) == (20, 2)
        assert set(second.tiers) == {"host", "disk", "far"}
        assert first.bytes > 80_000
        assert 0.0 <= first.age_s < 60.0
        assert not first.pinned
        assert not first.abandoned
        assert first.owed == ()
        assert dict(first.damage) == {}


def test_what_is_on_its_way_is_owed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Down(monkeypatch, "far")
    with tierfall.open(make_config(disk={}, far={}, max_wait="1s")) as ckpt:
        ckpt.save(1, state_of(1)).wait("disk", 20)
        (info,) = ckpt.checkpoints()
        assert info.owed == ("far",)
        assert "far" not in info.tiers or info.tiers["far"] is CopyState.ARRIVING
        down.down = False


def test_statistics_count_what_happened(make_config: MakeConfig) -> None:
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        empty = ckpt.statistics()
        assert (empty.saves, empty.blocked_s, empty.captured_s) == (0, 0.0, 0.0)
        assert set(empty.newest.values()) == {None}
        for step in (1, 2, 3):
            state = {**state_of(step), "model": torch.nn.Linear(2, 2)}
            ckpt.save(step, state, block=True)
            ckpt.wait_captured()
        ckpt.drain()
        wait_until(lambda: ckpt.statistics().dropped_copies == 2, "retention is done")
        messages = ckpt.statistics()
        assert (messages.saves, messages.skipped_saves, messages.failed_saves) == (3, 0, 0)
        assert messages.lazy_saves == 2
        assert dict(messages.commits) == {"disk": 3}
        image = ckpt.checkpoints()[-1].bytes
        assert dict(messages.edge_bytes) == {"host->disk": 3 * image}
        assert (messages.flush_failures, messages.given_up_copies) == (0, 0)
        assert messages.blocked_s > 0
        assert messages.captured_s > 0
        assert set(messages.durable_s) == {"disk"}
        assert messages.newest[LossClass.PROCESS] == 3
        assert messages.newest[LossClass.SITE] is None
        assert messages.host_capacity_bytes == 4 << 20


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


def test_restore_of_a_part_leaves_the_rest_alone_and_begins_no_line(
    make_config: MakeConfig, make_state: Callable[..., dict[str, Any]]
) -> None:
    config = make_config()
    source = make_state(3)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, source, block=True)
    with tierfall.open(config) as ckpt:
        state = make_state(4)
        moments = state["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
        rng = torch.get_rng_state()
        report = ckpt.restore(state, only=["model"])
        assert report is not None
        for name, tensor in source["model"].state_dict().items():
            assert torch.equal(state["model"].state_dict()[name], tensor)
        assert torch.equal(state["optimizer"].state_dict()["state"][0]["exp_avg"], moments)
        assert state["extra"] == {"epoch": 4}
        assert torch.equal(torch.get_rng_state(), rng)
        with pytest.raises(StepError, match="restore"):
            ckpt.save(2, state)


def test_restore_by_step_and_by_tier(make_config: MakeConfig) -> None:
    config = make_config(disk={}, far={"flush": {"every": 2}}, host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
    state = blank()
    with tierfall.open(config) as ckpt:
        newest = ckpt.restore(state)
        assert newest is not None
        assert (newest.step, {s.tier for s in newest.sources}) == (3, {"host"})
        far = ckpt.restore(state, tier="far")
        assert far is not None
        assert (far.step, step_in(state), {s.tier for s in far.sources}) == (2, 2, {"far"})
        named = ckpt.restore(state, step=1, tier="disk")
        assert named is not None
        assert (named.step, step_in(state)) == (1, 1)
        assert named.bytes == sum(s.bytes for s in named.sources) > 80_000
        assert named.seconds > 0
        assert named.fallbacks == ()
        assert named.sources[0].shard == "rank-00000-of-00001.safetensors"


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


def test_a_restore_right_after_a_save_sees_it(make_config: MakeConfig) -> None:
    with tierfall.open(make_config()) as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state_of(step))
            state = blank()
            report = ckpt.restore(state)
            assert report is not None
            assert (report.step, step_in(state)) == (step, step)


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


def test_drain_reports_what_became_durable(make_config: MakeConfig) -> None:
    with tierfall.open(make_config(disk={}, far={})) as ckpt:
        assert ckpt.drain().done == ()
        ckpt.save(1, state_of(1))
        report = ckpt.drain()
        assert report.left == ()
        assert set(report.done) <= {(1, 1, "disk"), (1, 1, "far")}
        assert report.seconds >= 0
        assert ckpt.drain().done == ()
        (info,) = ckpt.checkpoints()
        assert info.owed == ()


def test_a_tier_that_is_down_reports_on_the_handle_and_keeps_trying(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Down(monkeypatch, "far")
    with tierfall.open(make_config(disk={}, far={}, max_wait="1s")) as ckpt:
        handle = ckpt.save(1, state_of(1))
        handle.wait("disk", 20)
        with pytest.raises(FlushError, match="far is down") as caught:
            handle.wait(timeout=20)
        assert handle.outcome is SaveOutcome.FAILED
        assert isinstance(handle.exception(), FlushError)
        causes: list[BaseException] = [caught.value]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
            causes.append(cause)
        assert isinstance(causes[-1], UnreachableError)
        down.down = False
        wait_until(lambda: handle.outcome is SaveOutcome.SAVED, "the copy arrives after all")
        assert handle.exception() is None
    assert steps_on(tmp_path / "far") == [1]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    before = {t.name for t in threading.enumerate()}
    yield

    def left() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("tierfall")} - before

    wait_until(lambda: not left(), f"{left()} have ended")


@pytest.mark.usefixtures("no_thread_left")
def test_a_clean_end_leaves_no_thread_and_may_be_repeated(make_config: MakeConfig) -> None:
    ckpt = tierfall.open(make_config())
    ckpt.save(1, state_of(1))
    ckpt.close()
    ckpt.close()


@pytest.mark.usefixtures("no_thread_left")
def test_an_exception_in_the_block_ends_all_and_what_was_saved_is_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    def loop() -> None:
        with tierfall.open(make_config()) as ckpt:
            ckpt.save(1, state_of(1))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    assert steps_on(tmp_path / "disk") == [1]
