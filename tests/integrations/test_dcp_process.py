"""A TierWriter in a process of DCP's own: it pickles to what that process needs, and writes to the first stored tier.

Here the process is this one: what matters is that nothing but the pickled bytes is used.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import tierfall
from tests.core.capture.lazy_help import Trainer
from tests.core.ranks.threads import network, on_all
from tests.integrations.dcp_help import QUIET, emptied, nested, same
from tests.rank_kit import config_of
from tierfall.core.format.records import Commit
from tierfall.core.types.errors import (
    FencedError,
    FlushError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.integrations.dcp import TierReader, TierWriter
from tierfall.integrations.dcp.writer import DirectWriter
from tierfall.run.checkpointer import Checkpointer
from tierfall.tiers.stored import StoredTier

pytestmark = pytest.mark.filterwarnings(QUIET)

MakeConfig = Callable[..., dict[str, Any]]


def sent(writer: TierWriter) -> DirectWriter:
    """What arrives in the other process."""
    found = pickle.loads(pickle.dumps(writer))
    assert isinstance(found, DirectWriter)
    return found


@pytest.mark.parametrize("codec", ["none", "zstd", "planes"])
def test_what_another_process_writes_is_a_checkpoint_of_the_run(
    codec: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    trainer = Trainer()
    trainer.step()
    state = nested(trainer, view=torch.arange(6.0).view(2, 3).t(), none=torch.zeros(0))
    config = make_config(disk={"compress": {"codec": codec}}, chunk="4KiB")
    with tierfall.open(config) as ckpt:
        dcp.save({"n": 1}, storage_writer=TierWriter(ckpt, step=1, until="disk"))
        writer = TierWriter(ckpt, step=2, metrics={"loss": torch.tensor(0.5)}, tags=["mine"])
        dcp.save(state, storage_writer=sent(writer))
        with pytest.raises(CheckpointException, match="this lineage is at step 2 already"):
            dcp.save({"n": 1}, storage_writer=TierWriter(ckpt, step=2))
        dcp.save({"n": 3}, storage_writer=TierWriter(ckpt, step=3, until="disk"))
    assert same(tierfall.load(tmp_path / "disk", step=2), state)
    with tierfall.open(config) as ckpt:
        infos = {c.step: c for c in ckpt.checkpoints()}
        assert sorted(infos) == [1, 2, 3]
        assert (infos[2].metrics, infos[2].tags, infos[2].abandoned) == (
            {"loss": 0.5},
            ("mine",),
            False,
        )
        found = emptied(state)
        dcp.load(found, storage_reader=TierReader(ckpt, step=2))
        assert same(found, state)


def test_nothing_is_committed_unless_every_rank_has_written(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    class Forgetful(DirectWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            super().finish(metadata=metadata, results=[[]])

    with tierfall.open(make_config()) as ckpt:
        writer = Forgetful(sent(TierWriter(ckpt, step=1))._request)
        with pytest.raises(CheckpointException, match="0 of 1 ranks have written") as caught:
            dcp.save({"w": torch.ones(2), "n": 1}, storage_writer=writer)
        assert isinstance(caught.value.failures[0][0], FlushError)
    with tierfall.open(make_config()) as ckpt:
        assert ckpt.checkpoints() == []
        ckpt.save(3, {"n": 3}, block=True)
    left = [f.name for f in (tmp_path / "disk" / "run").glob("step-*")]
    assert left == ["step-00000003-a0002"], "the next start has collected it"


def names_in(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.glob("step-*"))


def test_the_start_that_gave_the_orders_flushes_and_retains_what_another_process_writes(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(disk={"retain": {"last": 2}}, far={"retain": {"last": 2}})
    with tierfall.open(config) as ckpt:
        for step in (1, 2, 3, 4):
            dcp.save({"n": step}, storage_writer=sent(TierWriter(ckpt, step=step)))
            assert ckpt.checkpoints()[-1].step == step
        assert ckpt.drain().left == ()
        assert {c.step: sorted(c.copies) for c in ckpt.checkpoints()} == {
            3: ["disk", "far"],
            4: ["disk", "far"],
        }
        dcp.save({"n": 5}, storage_writer=sent(TierWriter(ckpt, step=5)))
    # close looked once more
    kept = ["step-00000004-a0001", "step-00000005-a0001"]
    assert names_in(tmp_path / "far" / "run") == names_in(tmp_path / "disk" / "run") == kept
    assert tierfall.load(tmp_path / "far", step=5) == {"n": 5}


def test_what_another_process_did_not_finish_goes_once_a_later_one_is_there(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    class Killed(DirectWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            raise OSError("the process is gone")

    folder = tmp_path / "disk" / "run"
    with tierfall.open(make_config(disk={"retain": {"last": 1}})) as ckpt:
        with pytest.raises(CheckpointException, match="the process is gone"):
            dcp.save({"n": 1}, storage_writer=Killed(sent(TierWriter(ckpt, step=1))._request))
        assert ckpt.checkpoints() == []
        assert names_in(folder) == ["step-00000001-a0001"], "it may be at work yet"
        dcp.save({"n": 2}, storage_writer=sent(TierWriter(ckpt, step=2)))
        assert [c.step for c in ckpt.checkpoints()] == [2]
        ckpt.drain()
        assert names_in(folder) == ["step-00000002-a0001"]
        dcp.save({"n": 3}, storage_writer=sent(TierWriter(ckpt, step=3)))
        ckpt.drain()
        assert names_in(folder) == ["step-00000003-a0001"], "retained by its tier's rule"


def test_one_that_could_not_be_asked_for_is_not_taken_for_failed_when_a_later_one_is_there(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = StoredTier.read_commit

    def read_commit(store: StoredTier, checkpoint: CheckpointId) -> Commit:
        if checkpoint.step == 1:
            raise UnreachableError("disk: the server does not answer")
        return real(store, checkpoint)

    with tierfall.open(make_config()) as ckpt:
        with monkeypatch.context() as patch:
            patch.setattr(StoredTier, "read_commit", read_commit)
            for step in (1, 2):
                dcp.save({"n": step}, storage_writer=sent(TierWriter(ckpt, step=step)))
            assert [c.step for c in ckpt.checkpoints()] == [2]
        assert [c.step for c in ckpt.checkpoints()] == [1, 2]


def test_all_ranks_hear_of_what_their_processes_wrote(tmp_path: Path) -> None:
    def planned(rank: int) -> tuple[DefaultSavePlanner, SavePlan]:
        planner = DefaultSavePlanner()
        state = {f"w{rank}": torch.full((4,), float(rank))}
        planner.set_up_planner(state, is_coordinator=rank == 0)
        return planner, planner.create_local_plan()

    config = config_of(tmp_path, near={}, far={})
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, ranks=r) for r in ranks])  # type: ignore[misc]
        writers = [sent(TierWriter(ckpt, step=1)) for ckpt in opened]
        plans = [planned(rank) for rank in (0, 1)]
        global_plan, metadata = plans[0][0].create_global_plan([plan for _, plan in plans])
        results = [
            writer.write_data(plan, planner).wait()
            for writer, plan, (planner, _) in zip(writers, global_plan, plans, strict=True)
        ]
        writers[0].finish(metadata=metadata, results=results)
        reports = on_all([ckpt.drain for ckpt in opened])
        assert all(report.left == () for report in reports), reports
        output = on_all([ckpt.checkpoints for ckpt in opened])
        assert [[(c.step, sorted(c.copies)) for c in of_rank] for of_rank in output] == [
            [(1, ["far", "near"])]
        ] * 2
        unwritten = sent(TierWriter(opened[1], step=2))  # rank 0 expects nothing
        began = time.monotonic()
        assert on_all([ckpt.close for ckpt in opened]) == [None, None]
        assert time.monotonic() - began < config.max_wait_s / 2, "what is unwritten is not awaited"
        del unwritten
    assert torch.equal(tierfall.load(tmp_path / "far")["w1"], torch.ones(4))


def test_a_process_that_a_newer_start_has_followed_writes_nothing(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    with tierfall.open(make_config()) as ckpt:
        writer = sent(TierWriter(ckpt, step=1))
    with tierfall.open(make_config()):
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"n": 1}, storage_writer=writer)
        assert isinstance(caught.value.failures[0][0], FencedError)
    assert not list((tmp_path / "disk" / "run").glob("step-*"))
