"""A Trainer of Lightning whose checkpoints are tierfall's goes on, after a kill -9, to the same losses."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader

import tierfall
from tests.distributed.job import Job
from tests.integrations.frameworks.lightning_program import Data, Module, config, trainer
from tierfall.errors import ConfigError, StepError
from tierfall.integrations.lightning import TierfallIO, remove_path

PROGRAM = Path(__file__).with_name("lightning_program.py")
IMPORTS = ("tests.integrations.frameworks.lightning_program",)
pytestmark = pytest.mark.filterwarnings("ignore")
COMMIT = "commit.json"
Start = Callable[..., "Training"]


# Killed, and started again -------------------------------------------------------------------------------


@dataclass
class Training:
    """One start of all ranks."""

    job: Job
    log: Path

    def lines(self, rank: int = 0) -> list[list[Any]]:
        """Return step, epoch, batch and loss of each batch."""
        file = self.log.with_suffix(f".{rank}")
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def end(self) -> list[list[Any]]:
        answers = self.job.wait(150)
        assert answers == [None] * self.job.world_size, (answers, self.job.log(0))
        return self.lines()

    def kill_after(self, batches: int) -> None:
        """Kill all ranks once ``batches`` are logged and a checkpoint is stored."""
        stored = self.job.folder / "disk"
        self.job.wait_until(lambda: len(self.lines()) >= batches and any(stored.rglob(COMMIT)))
        self.job.kill()


@pytest.fixture
def start(make_job: Callable[..., Job]) -> Start:
    """``start(folder, log, ranks=..., ...)`` starts a training in a folder."""

    def begin(folder: Path, log: str, ranks: int = 1, **more: Any) -> Training:
        job = make_job(folder, PROGRAM, ranks)
        return Training(job.start("main", log=log, ranks=ranks, **more), folder / log)

    return begin


@pytest.fixture
def seed() -> int:
    """What decides when a training is killed; set TIERFALL_KILL_SEED to try another time."""
    return int(os.environ.get("TIERFALL_KILL_SEED", "1"))


CASES = {
    "1 rank": {},
    "2 ranks, accumulating": {"ranks": 2, "accumulate": 2, "every": 3},
    "2 ranks, FSDP1": {"ranks": 2, "sharded": "FSDP1"},
    "2 ranks, FSDP2": {"ranks": 2, "sharded": "FSDP2"},
}


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES)
def test_after_a_kill_every_loss_is_that_of_an_uninterrupted_run(
    start: Start, case: str, tmp_path: Path, seed: int
) -> None:
    arguments = CASES[case]
    folders = [tmp_path / name for name in ("whole", "killed")]
    whole = start(folders[0], "whole", **arguments)
    whole.end()
    killed = start(folders[1], "killed", pause_s=0.1, waits_at=22, **arguments)
    killed.kill_after(random.Random(f"{seed}{case}").randint(8, 20))
    resumed = start(folders[1], "resumed", **arguments)
    resumed.end()
    for rank in range(int(arguments.get("ranks", 1))):  # type: ignore[call-overload]
        expected, found = whole.lines(rank), resumed.lines(rank)
        assert 0 < len(found) < len(expected), "it did not go on from a checkpoint"
        assert found == expected[-len(found) :]


@pytest.mark.parametrize("sharded", ["", "FSDP2"])
def test_another_number_of_ranks_resumes(start: Start, sharded: str, tmp_path: Path) -> None:
    """Without the random state, which fits no other number of ranks."""
    same = {"every": 8, "own_loader": True, "sharded": sharded}
    start(tmp_path, "two", ranks=2, epochs=2, **same).end()
    found = start(tmp_path, "one", ranks=1, epochs=3, **same).end()
    assert [line[:3] for line in found] == [[16 + batch, 2, batch] for batch in range(8)]


@pytest.mark.parametrize("sharded", ["", "FSDP1"])
def test_a_save_on_rank_0_alone_ends_with_an_error_on_all_ranks(
    start: Start, sharded: str, tmp_path: Path
) -> None:
    """Without tierfall, it waits for the other ranks for half an hour."""
    job = start(tmp_path, "alone", ranks=2, sharded=sharded, alone=True).job
    assert 0 not in [process.wait(150) for process in job.processes]
    expected = "rank 1 did not call save_checkpoint within 20 s. Nothing was saved"
    assert expected in (tmp_path / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("sharded", "where"), [("", "start"), ("FSDP1", "start"), ("FSDP1", "end")]
)
def test_an_exception_on_rank_0_alone_is_waited_for_once(
    start: Start, sharded: str, where: str, tmp_path: Path
) -> None:
    """OnExceptionCheckpoint saves on that rank, while the others train: Lightning itself waits for half an hour."""
    job = start(tmp_path, "failed", ranks=2, sharded=sharded, fails=where).job
    assert job.processes[0].wait(100) == 1
    output = (tmp_path / "rank-0.log").read_text()
    assert "ValueError: the batch of rank 0 is bad" in output
    missed = "rank 1 did not call save_checkpoint within 2 s. Nothing was saved. The training failed on this rank alone"
    assert missed in output


def test_killed_inside_a_save(start: Start, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("whole", "killed")]
    whole = start(folders[0], "whole", every=4)
    expected = whole.end()
    # the last batch but four of an epoch
    start(folders[1], "killed", every=4, dies_in=3).job.wait_for_kill(120)
    found = start(folders[1], "resumed", every=4).end()
    assert 0 < len(found) < len(expected)
    assert found == expected[-len(found) :]


def test_epoch_borders_are_exact_with_a_loader_that_has_no_state(
    start: Start, tmp_path: Path
) -> None:
    """Lightning resumes a checkpoint of its own, of the last batch of an epoch, one epoch too late."""
    folders = [tmp_path / name for name in ("whole", "killed")]
    killed = start(folders[1], "killed", every=8, own_loader=True, pause_s=0.1, waits_at=22)
    killed.kill_after(20)
    expected = start(folders[0], "whole", every=8, own_loader=True).end()
    found = start(folders[1], "resumed", every=8, own_loader=True).end()
    assert len(found) in (8, 16), "the epoch that the kill cut off, or one more"
    assert found == expected[-len(found) :]


# In this process -----------------------------------------------------------------------------------------


@pytest.fixture
def io(tmp_path: Path) -> Iterator[TierfallIO]:
    made = TierfallIO(config(tmp_path))
    yield made
    made.teardown()


def fit(
    io: TierfallIO, folder: Path, path: str | None = None, *, epochs: int = 2, **more: Any
) -> pl.Trainer:
    options = {"dirpath": folder / "checkpoints", "save_last": True, **more}
    made = trainer(io, ModelCheckpoint(**options), max_epochs=epochs)
    module = Module()
    made.fit(module, DataLoader(Data(32), batch_size=8), DataLoader(Data(8)), ckpt_path=path)
    return made


def test_best_and_last_and_what_is_kept(io: TierfallIO, tmp_path: Path) -> None:
    made = fit(io, tmp_path, epochs=3, monitor="val_loss", save_top_k=1)
    saves = made.checkpoint_callback
    assert isinstance(saves, ModelCheckpoint)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == sorted(["last.ckpt", Path(saves.best_model_path).name]), "save_top_k=1"
    best = tierfall.read_pointer(saves.best_model_path)
    loaded = tierfall.load(saves.best_model_path)["lightning"]
    assert loaded["global_step"] == best.step
    made.validate(Module(), DataLoader(Data(8)), ckpt_path="best")
    weight = made.lightning_module.state_dict()["net.0.weight"]
    assert torch.equal(weight, loaded["state_dict"]["net.0.weight"])


def test_last_is_the_newest_and_another_path_its_own_step(io: TierfallIO, tmp_path: Path) -> None:
    fit(io, tmp_path, epochs=3, every_n_epochs=1, save_top_k=-1)
    older = next(
        path
        for path in (tmp_path / "checkpoints").iterdir()
        if tierfall.read_pointer(path).step == 4
    )
    assert fit(io, tmp_path, "last", epochs=3).global_step == 12
    assert fit(io, tmp_path, str(older), epochs=4).global_step == 16
    steps = {info.step: info.abandoned for info in _known(tmp_path)}
    assert steps[4] is False
    assert tierfall.read_pointer(tmp_path / "checkpoints/last.ckpt").step >= 12


def _known(folder: Path) -> list[tierfall.CheckpointInfo]:
    with tierfall.open(config(folder)) as ckpt:
        ckpt.load(resume=False)
        return ckpt.checkpoints()


def test_metrics_are_saved_for_retention(io: TierfallIO, tmp_path: Path) -> None:
    fit(io, tmp_path)
    assert "val_loss" in _known(tmp_path)[-1].metrics


def test_a_plugin_that_is_no_callback_is_refused(io: TierfallIO, tmp_path: Path) -> None:
    """It would be called on rank 0 alone."""
    with pytest.raises(ConfigError, match=r"Trainer\(plugins=\[io\], callbacks=\[io\]\)"):
        io.save_checkpoint({}, tmp_path / "x.ckpt")


def test_a_run_that_has_checkpoints_is_not_trained_anew(io: TierfallIO, tmp_path: Path) -> None:
    fit(io, tmp_path)
    with pytest.raises(StepError, match="begin: run 'lightning' has checkpoints"):
        fit(io, tmp_path)
    fit(TierfallIO(config(tmp_path), fresh=True), tmp_path)


def test_a_new_run_begins_with_a_checkpoint_of_lightnings_own_and_no_other_does(
    io: TierfallIO, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(dirpath=tmp_path / "own")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = pl.Trainer(accelerator="cpu", callbacks=[saves], max_epochs=1, **quiet)
    own.fit(Module(), DataLoader(Data(32), batch_size=8))
    made = fit(io, tmp_path, saves.best_model_path)
    assert (made.global_step, [info.step for info in _known(tmp_path)]) == (8, [8])
    with pytest.raises(StepError, match=r"has checkpoints.* call fit\(..., ckpt_path=\"last\"\)"):
        fit(io, tmp_path, saves.best_model_path)
    made.validate(Module(), DataLoader(Data(8)), ckpt_path=saves.best_model_path)


def test_a_save_within_a_batch_names_the_checkpoint_before_it(
    io: TierfallIO, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by the handler of a signal: Lightning would leave the batch out of a run that resumes from its middle."""

    class Interrupted(Module):
        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if self.global_step in (0, 6):
                self.trainer.save_checkpoint(tmp_path / f"within-{self.global_step}.ckpt")
            return super().training_step(batch, number)

    made = trainer(io, ModelCheckpoint(dirpath=tmp_path / "checkpoints"), max_epochs=2)
    made.fit(Interrupted(), DataLoader(Data(32), batch_size=8))
    assert tierfall.read_pointer(tmp_path / "within-6.ckpt").step == 4
    assert not (tmp_path / "within-0.ckpt").exists()
    assert "a save within a batch names the checkpoint before it, if any" in caplog.text
    assert [info.step for info in _known(tmp_path)] == [4, 8]


def test_a_pointer_that_a_killed_start_has_removed_is_not_missed(
    io: TierfallIO, tmp_path: Path
) -> None:
    """The state of the callback that removes it is older."""
    made = fit(io, tmp_path, epochs=2, every_n_epochs=1, save_top_k=1)
    assert isinstance(made.checkpoint_callback, ModelCheckpoint)
    shutil.rmtree(made.checkpoint_callback.best_model_path)
    assert fit(io, tmp_path, "last", epochs=3, every_n_epochs=1, save_top_k=1).global_step == 12


def test_a_folder_that_is_no_checkpoint_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"is no checkpoint: it has no tierfall\.json"):
        remove_path(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_save_that_finds_no_memory_ends_no_training(
    io: TierfallIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, steps = tierfall.Checkpointer.save, []

    def save(ckpt: Any, step: int, *args: Any, **more: Any) -> Any:
        steps.append(step)
        skipped = SimpleNamespace(outcome="skipped")
        return skipped if step == 8 else real(ckpt, step, *args, **more)

    monkeypatch.setattr(tierfall.Checkpointer, "save", save)
    fit(io, tmp_path, epochs=3, every_n_epochs=1, save_top_k=-1)
    pointers = map(tierfall.read_pointer, (tmp_path / "checkpoints").iterdir())
    assert sorted(pointer.step for pointer in pointers) == [4, 4, 12, 12]
    assert steps == [4, 8, 12], "last.ckpt does not try again"


def test_a_pointer_of_another_run_in_the_same_folder_is_named(
    io: TierfallIO, tmp_path: Path
) -> None:
    """Both runs have a step 4; each continues from its own newest by ``last``."""
    other = TierfallIO(config(tmp_path), run="other")
    fit(io, tmp_path, every_n_epochs=1, save_top_k=-1)
    fit(other, tmp_path, epochs=1)
    path = next(
        path
        for path in (tmp_path / "checkpoints").iterdir()
        if tierfall.read_pointer(path).run == "lightning"
    )
    with pytest.raises(ConfigError, match="of run 'lightning', not of 'other'"):
        fit(other, tmp_path, str(path))
    assert fit(io, tmp_path, "last", epochs=3).global_step == 12
    assert fit(other, tmp_path, "last", epochs=2).global_step == 8


def test_a_run_whose_pointers_were_deleted_continues(io: TierfallIO, tmp_path: Path) -> None:
    fit(io, tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(StepError, match=r'or "last\.ckpt" if the folder of pointers was lost'):
        fit(io, tmp_path, "last", epochs=3)
    assert fit(io, tmp_path, "last.ckpt", epochs=3).global_step == 12


def test_an_error_before_the_training_is_not_hidden_by_its_save(
    io: TierfallIO, tmp_path: Path
) -> None:
    class Fails(Module):
        def on_fit_start(self) -> None:
            raise ValueError("no data")

    made = trainer(io, ModelCheckpoint(dirpath=tmp_path), max_epochs=1)
    made.callbacks.append(OnExceptionCheckpoint(tmp_path))
    with pytest.raises(ValueError, match="no data"):
        made.fit(Fails(), DataLoader(Data(32), batch_size=8))


def test_weights_alone_are_refused(io: TierfallIO, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save_weights_only.*tierfall export"):
        fit(io, tmp_path, save_weights_only=True)


@pytest.mark.parametrize(
    ("kind", "options", "remedy"),
    [
        (DeepSpeedStrategy, {}, r"DeepSpeedStrategy: use tierfall\.integrations\.deepspeed"),
        (FSDPStrategy, {"process_group": None}, "pass device_mesh in place of process_group"),
    ],
)
def test_a_strategy_that_is_not_supported_is_named(
    io: TierfallIO, tmp_path: Path, kind: type, options: dict[str, Any], remedy: str
) -> None:
    made = trainer(io, ModelCheckpoint(dirpath=tmp_path))
    made.strategy.__class__, made.strategy.kwargs = kind, options
    with pytest.raises(ConfigError, match=remedy):
        io.setup(made, Module(), "fit")


@pytest.mark.parametrize("version", ["2.5.6", "3.0.0"])
def test_a_version_out_of_range_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with pytest.raises(ConfigError, match=f"lightning {version} is .* 'lightning>=2.6,<3'"):
        TierfallIO("tiers.yaml")
