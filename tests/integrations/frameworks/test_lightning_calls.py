"""What a program of Lightning calls beside ``fit``: evaluations, ``load_from_checkpoint``, searches; what is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning.pytorch")
pytest.importorskip("torchdata")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

import tierfall
from tests.integrations.frameworks.lightning_program import Data, config, trainer
from tierfall.errors import ConfigError, RestoreError
from tierfall.integrations.lightning import TierfallIO

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore")]
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(pl.LightningModule):
    """Has hyperparameters, as a learning rate that a search sets."""

    def __init__(self, width: int = 4, lr: float = 1e-2, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.batch_size = lr, batch_size
        self.net = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 16))

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, number: int) -> None:
        self.log("val_loss", (self.net(batch) - batch).square().mean())

    def predict_step(self, batch: torch.Tensor, number: int) -> Any:
        return self.net(batch)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(Data(32), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return rows()


@pytest.fixture
def io(tmp_path: Path) -> Iterator[TierfallIO]:
    made = TierfallIO(config(tmp_path))
    yield made
    made.teardown()


@pytest.fixture
def trained(io: TierfallIO, tmp_path: Path) -> pl.Trainer:
    """A Trainer that has saved steps 4 and 8, with a pointer to each, and ``last.ckpt``."""
    saves = ModelCheckpoint(tmp_path / "saves", save_top_k=-1, save_last=True, every_n_epochs=1)
    made = trainer(io, saves, max_epochs=2)
    made.fit(Module(width=6))
    return made


def rows() -> Any:
    return DataLoader(Data(8), batch_size=8)


def test_last_is_the_newest_checkpoint_in_every_evaluation(
    trained: pl.Trainer, tmp_path: Path
) -> None:
    """In a program that has no ModelCheckpoint, where Lightning itself finds none and evaluates untrained weights."""
    found = config(tmp_path)
    expected = tierfall.load(found)["lightning"]["state_dict"]
    evaluations: list[Callable[..., Any]] = [
        pl.Trainer.validate,
        pl.Trainer.test,
        pl.Trainer.predict,
    ]
    for evaluate in evaluations:
        fresh, module = pl.Trainer(plugins=[TierfallIO(found)], **QUIET), Module(width=6)
        evaluate(fresh, module, rows(), ckpt_path="last")
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, expected[name]), (evaluate, name)


def test_last_of_a_run_without_checkpoints_is_an_error(trained: pl.Trainer, tmp_path: Path) -> None:
    tester = pl.Trainer(plugins=[TierfallIO(config(tmp_path), run="other")], **QUIET)
    with pytest.raises(RestoreError, match="other"):
        tester.test(Module(), rows(), ckpt_path="last")


def test_modules_are_loaded_from_a_pointer(trained: pl.Trainer, tmp_path: Path) -> None:
    """``last.ckpt`` is the newest one of its run; another path names its step."""
    found = config(tmp_path)
    steps = {p.name: tierfall.read_pointer(p).step for p in (tmp_path / "saves").iterdir()}
    assert sorted(steps.values()) == [4, 8, 8]
    for name, step in steps.items():
        loaded = Module.load_from_checkpoint(tmp_path / "saves" / name, lr=0.5, map_location="cpu")
        saved = tierfall.load(found, step=step)["lightning"]["state_dict"]
        assert (loaded.hparams.width, loaded.lr) == (6, 0.5)  # type: ignore[attr-defined]
        assert all(torch.equal(x, saved[key]) for key, x in loaded.state_dict().items())


def found_by_call(made: pl.Trainer, module: Module) -> Any:
    return Tuner(made).lr_find(module, num_training=5)


def sized_by_call(made: pl.Trainer, module: Module) -> Any:
    return Tuner(made).scale_batch_size(module, max_trials=2)


def found_by_callback(made: pl.Trainer, module: Module) -> Any:
    made.callbacks.insert(0, LearningRateFinder(num_training_steps=5))


def sized_by_callback(made: pl.Trainer, module: Module) -> Any:
    made.callbacks.insert(0, BatchSizeFinder(max_trials=2))


@pytest.mark.parametrize(
    "search", [found_by_call, sized_by_call, found_by_callback, sized_by_callback]
)
def test_a_search_leaves_nothing_in_the_run_and_its_weights_are_discarded(
    io: TierfallIO, tmp_path: Path, search: Callable[[pl.Trainer, Module], Any]
) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", every_n_epochs=1, save_top_k=-1, save_last=True)
    made, module = trainer(io, saves, max_epochs=1, default_root_dir=tmp_path), Module()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    search(made, module)
    if search in (found_by_call, sized_by_call):
        assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
        assert not (tmp_path / "disk" / "lightning").exists()
    made.fit(module, ckpt_path="last")
    steps = -(-32 // module.batch_size)
    with tierfall.open(config(tmp_path)) as ckpt:
        assert [info.step for info in ckpt.checkpoints()] == [steps]
    assert [path.name for path in tmp_path.glob(".*.ckpt")] == []


def test_a_strategy_that_shards_says_where_to_search(io: TierfallIO, tmp_path: Path) -> None:
    made = trainer(io, ModelCheckpoint(dirpath=tmp_path))
    made.strategy.__class__ = ModelParallelStrategy
    io.setup(made, Module(), "fit")
    with pytest.raises(ConfigError, match="search for a learning rate with a Trainer without"):
        made.strategy.lightning_module_state_dict()
    with pytest.raises(ConfigError, match="search for a learning rate with a Trainer without"):
        made.strategy.save_checkpoint({}, ".lr_find_1.ckpt")


@pytest.mark.parametrize(
    ("retain", "top_k", "expected"),
    [
        (None, 3, None),
        (None, -1, None),
        ({"last": 2}, 1, "`best: {metric: val_loss, mode: min}` in `retain` of tier disk"),
        (
            {"last": 2},
            2,
            "`best: {metric: val_loss, mode: min, count: 2}` in `retain` of tier disk",
        ),
        ({"last": 2, "best": {"metric": "val_loss", "count": 3}}, 2, None),
        ({"last": 2, "best": {"metric": "val_loss"}}, 2, "mode: min, count: 2}` in `retain`"),
        ({"last": 2}, -1, "save_top_k=-1 leaves a path for each checkpoint, and no tier keeps all"),
        ({"last": 1}, 0, None),
    ],
)
def test_top_k_that_no_tier_keeps_has_one_warning_with_what_to_write(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    retain: dict[str, Any] | None,
    top_k: int,
    expected: str | None,
) -> None:
    found = config(tmp_path)
    if retain is not None:
        found["tiers"][1]["retain"] = retain
    saves = ModelCheckpoint(tmp_path / "saves", monitor="val_loss", save_top_k=top_k)
    made = trainer(TierfallIO(found), saves, max_epochs=1)
    made.fit(Module())
    texts = [r.getMessage() for r in caplog.records if "save_top_k" in r.getMessage()]
    assert len(texts) == (expected is not None)
    assert (expected or "") in "".join(texts)


@pytest.mark.parametrize(("metric", "missed"), [("val_loss", 0), ("val_los", 1)])
def test_a_metric_that_no_evaluation_logs_is_warned_of_and_not_before_the_first_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, metric: str, missed: int
) -> None:
    """Each of four steps is saved, and the last one is evaluated."""
    found = config(tmp_path)
    found["tiers"][1]["retain"] = {"last": 1, "best": {"metric": metric}}
    saves = ModelCheckpoint(tmp_path / "saves", every_n_train_steps=1, save_top_k=1)
    trainer(TierfallIO(found), saves, max_epochs=1).fit(Module())
    assert caplog.text.count(f'no checkpoint has the metric "{metric}"') == missed


def test_top_k_by_two_metrics_needs_two_tiers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = config(tmp_path)
    found["tiers"][1]["retain"] = {"last": 1, "best": {"metric": "val_loss"}}

    def fit(run: str) -> list[str]:
        one = ModelCheckpoint(tmp_path / run / "1", monitor="val_loss", save_top_k=1)
        two = ModelCheckpoint(tmp_path / run / "2", monitor="loss", save_top_k=1)
        made = trainer(TierfallIO(found | {"run": run}), one, max_epochs=1)
        newest = ModelCheckpoint(tmp_path / run / "3", monitor="step", mode="max", save_top_k=2)
        made.callbacks += [two, newest]
        made.fit(Module())
        return [r.getMessage() for r in caplog.records if "save_top_k" in r.getMessage()]

    text, newest = fit("on-one-tier")
    assert "by step, and no tier keeps these: write `last: 2` in `retain` of tier disk" in newest
    assert "by loss" in text
    assert "has one `best`: each monitor needs a tier of its own" in text
    more = {"name": "more", "kind": "file", "path": str(tmp_path / "more"), "retain": {"last": 1}}
    found["tiers"].append(more)
    assert "`best: {metric: loss, mode: min}` in `retain` of tier more" in fit("without-best")[2]
    more["retain"] = {"last": 2, "best": {"metric": "loss"}}
    caplog.clear()
    assert fit("on-two-tiers") == []


@pytest.mark.parametrize(
    ("monitor", "mode", "retain"),
    [
        ("step", "max", {"last": 2}),
        ("step", "min", {"last": 1, "best": {"metric": "step", "count": 2}}),
        ("epoch", "max", {"last": 1, "best": {"metric": "epoch", "mode": "max", "count": 2}}),
    ],
)
def test_top_k_by_step_or_epoch_is_kept(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monitor: str,
    mode: str,
    retain: dict[str, Any],
) -> None:
    """No module logs these: ModelCheckpoint has them by itself."""
    found = config(tmp_path)
    found["tiers"][1]["retain"] = retain
    saves = ModelCheckpoint(tmp_path, "{step}", monitor=monitor, mode=mode, save_top_k=2)
    trainer(TierfallIO(found), saves, max_epochs=3).fit(Module())
    assert "save_top_k" not in caplog.text
    with tierfall.open(found) as ckpt:
        kept = {info.step for info in ckpt.checkpoints() if "disk" in info.copies}
    pointed = {int(path.stem.removeprefix("step=")) for path in tmp_path.glob("step=*")}
    assert kept == pointed == ({4, 8} if mode == "min" else {8, 12})
