"""A Trainer on a Checkpointer, in one process: what is saved, what is resumed, and what is refused."""

from __future__ import annotations

import gc
import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tierfall
from tierfall.errors import ConfigError, RestoreError, TierfallError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.integrations.frameworks import hugging_face as made  # noqa: E402 - it imports the framework
from tierfall.integrations.accelerate import state_of  # noqa: E402
from tierfall.integrations.transformers import TrainerJson, attach  # noqa: E402

pytestmark = [
    pytest.mark.quick,
    pytest.mark.filterwarnings("default"),  # of the frameworks
]
Open = Callable[..., tierfall.Checkpointer]


@pytest.fixture
def config(tmp_path: Path, memory: Path) -> dict[str, Any]:
    found = made.config(tmp_path, str(memory))
    found["tiers"][1].pop("retain")
    return found


def losses_of(trainer: Any, ckpt: tierfall.Checkpointer, **which: Any) -> dict[int, float]:
    """Train to the end, and return the loss of each step."""
    found = attach(trainer, ckpt, **which)
    trainer.train(resume_from_checkpoint=found)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"]: entry["loss"] for entry in logged}


def test_each_step_resumes_exactly_across_the_border_of_an_epoch(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An epoch has 10 steps of two batches. The resumed run has the log of the steps before, too."""
    caplog.set_level(logging.WARNING, logger="tierfall")
    with tierfall.open(config) as ckpt:
        whole = losses_of(made.plain(tmp_path, tmp_path / "whole"), ckpt)
    assert list(whole) == [*range(1, made.STEPS + 1)]
    for step in (11, 10, 9):
        with tierfall.open(config) as ckpt:
            assert losses_of(made.plain(tmp_path, tmp_path / f"{step}"), ckpt, step=step) == whole
        assert (tmp_path / f"{step}").read_text() in (tmp_path / "whole").read_text()
    assert "shuffles" not in caplog.text


def test_a_checkpoint_has_what_the_step_logged(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = made.plain(
        tmp_path, tmp_path / "losses", eval_strategy="steps", eval_steps=1, max_steps=2
    )
    with tierfall.open(config) as ckpt:
        losses_of(trainer, ckpt)
    with tierfall.open(config) as ckpt:
        (_, last) = ckpt.checkpoints()
    logged = [entry for entry in trainer.state.log_history if entry["step"] == 2]
    assert last.metrics["loss"] == logged[0]["loss"]
    assert last.metrics["eval_loss"] == logged[1]["eval_loss"]


def test_without_a_save_strategy_the_interval_of_the_tiers_decides(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of the Trainer, which grows with each step, is converted at these steps alone."""
    trainer = made.plain(tmp_path, tmp_path / "losses", save_strategy="no", max_steps=8)
    converted = []
    convert = TrainerJson.state_dict

    def state_dict(found: TrainerJson) -> dict[str, str]:
        converted.append(trainer.state.global_step)
        return convert(found)

    monkeypatch.setattr(TrainerJson, "state_dict", state_dict)
    with tierfall.open({**config, "interval": {"every": 3}}) as ckpt:
        losses_of(trainer, ckpt)
    assert set(converted) == {3, 6, 8}
    with tierfall.open(config) as ckpt:
        assert [info.step for info in ckpt.checkpoints()] == [3, 6, 8]


def test_a_signal_saves_without_a_save_strategy(config: dict[str, Any], tmp_path: Path) -> None:
    class Signals(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == 3:
                os.kill(os.getpid(), signal.SIGUSR1)

    trainer = made.plain(tmp_path, tmp_path / "losses", save_strategy="no", max_steps=6)
    trainer.add_callback(Signals())
    interval = {"every": 100, "on_signal": ["SIGUSR1"], "at_end": False}
    with tierfall.open({**config, "interval": interval}) as ckpt:
        losses_of(trainer, ckpt)
        assert [info.step for info in ckpt.checkpoints()] == [4]


def test_the_best_model_is_loaded_at_the_end(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = best_of(tmp_path)
    with tierfall.open(config) as ckpt:
        losses_of(trainer, ckpt)
    assert trainer.state.best_global_step == 1, "the learning rate is meant to do harm"
    saved = tierfall.load(config, step=1)["model"]
    now = trainer.model.state_dict()
    assert all(torch.equal(now[name], saved[name]) for name in saved)
    newest = tierfall.load(config)["model"]
    assert not all(torch.equal(now[name], newest[name]) for name in saved)


def test_a_best_model_that_was_deleted_gives_way_to_the_next_best_with_a_warning(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = best_of(tmp_path)
    with tierfall.open(config) as ckpt:
        found = attach(trainer, ckpt)
        trainer.add_callback(AtEnd(lambda: ckpt.delete(1), step=4))
        trainer.train(resume_from_checkpoint=found)
        left = {info.step: info.metrics["eval_loss"] for info in ckpt.checkpoints()}
    best = min(left, key=lambda step: left[step])
    assert_is_step(trainer, config, best)
    assert f"there is no checkpoint of step 1: that of step {best} is loaded" in caplog.text


def test_the_end_of_a_training_without_an_evaluated_checkpoint_says_what_to_do(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer = best_of(tmp_path)
    with tierfall.open(config) as ckpt:
        found = attach(trainer, ckpt)

        def delete_all() -> None:
            for step in range(1, 5):
                ckpt.delete(step, even_the_last=True)

        trainer.add_callback(AtEnd(delete_all, step=4))
        with pytest.raises(RestoreError, match="no checkpoint has the metric eval_loss: save at"):
            trainer.train(resume_from_checkpoint=found)


def counted(folder: Path, hits: list[Any], **changes: Any) -> Any:
    """A Trainer that evaluates and saves each step, and counts so many hits there."""
    found = iter(hits)
    return made.plain(
        folder,
        folder / "losses",
        **{
            "eval_strategy": "steps",
            "eval_steps": 1,
            "max_steps": len(hits),
            "load_best_model_at_end": True,
            "metric_for_best_model": "hits",
            "greater_is_better": True,
            "compute_metrics": lambda _: {"hits": next(found), "kind": "count"},
            **changes,
        },
    )


def assert_is_step(trainer: Any, config: dict[str, Any], step: int) -> None:
    saved, now = tierfall.load(config, step=step)["model"], trainer.model.state_dict()
    assert all(torch.equal(now[name], saved[name]) for name in saved)


KEEPS_HITS = {"last": 1, "best": {"metric": "eval_hits", "mode": "max"}}


@pytest.mark.parametrize(
    ("hits", "kept"),
    [([1, 9, 4, 5], 2), ([1, 9, 9, 5], 3), ([False, True, False, False], 2)],
)
def test_the_best_model_by_a_count_is_kept_and_loaded(
    config: dict[str, Any], tmp_path: Path, hits: list[Any], kept: int
) -> None:
    """Of equal ones, retention keeps the newest, and Trainer names the oldest. The last step is trained by a restart,
    which finds nothing in memory."""
    config["tiers"][1]["retain"] = KEEPS_HITS
    for done, steps in ((0, 3), (3, 4)):
        trainer = counted(tmp_path, hits[done:], max_steps=steps)
        with tierfall.open(config) as ckpt:
            losses_of(trainer, ckpt)
    assert_is_step(trainer, config, kept)
    with tierfall.open(config) as ckpt:
        metrics = {info.step: info.metrics for info in ckpt.checkpoints()}
    assert sorted(metrics) == [kept, 4]
    assert metrics[kept]["eval_hits"] == max(hits)
    assert not {"step", "eval_kind"} & set(metrics[kept])


@pytest.mark.parametrize(("metric", "warnings"), [("eval_kind", 1), ("eval_hits", 0)])
def test_a_metric_that_no_evaluation_has_is_warned_of_and_not_before_the_first_one(
    config: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    metric: str,
    warnings: int,
) -> None:
    """It is text. Steps 3 and 6 are evaluated, and each step is saved."""
    config["tiers"][1]["retain"] = {"last": 1, "best": {"metric": metric, "mode": "max"}}
    changes = {"load_best_model_at_end": False, "eval_steps": 3, "max_steps": 6}
    before: list[str] = []
    trainer = counted(tmp_path, [1, 2], **changes)
    trainer.add_callback(AtEnd(lambda: before.append(caplog.text), step=3))
    with tierfall.open(config) as ckpt:
        trainer.add_callback(AtEnd(lambda: ckpt.drain(), step=2))
        losses_of(trainer, ckpt)
    missing = f'retain.best of disk keeps nothing: no checkpoint has the metric "{metric}"'
    (text,) = before
    assert missing not in text
    assert caplog.text.count(missing) == warnings


def test_the_metrics_of_a_dozen_evaluation_sets_are_saved(
    config: dict[str, Any], tmp_path: Path
) -> None:
    trainer = counted(tmp_path, [1] * 12, max_steps=1, load_best_model_at_end=False)
    trainer.eval_dataset = {f"set{n}": made.rows()[:2] for n in range(12)}
    trainer.args.metric_for_best_model = None
    with tierfall.open(config) as ckpt:
        losses_of(trainer, ckpt)
        ckpt.drain()
        (info,) = ckpt.checkpoints()
    assert {f"eval_set{n}_hits" for n in range(12)} < set(info.metrics)
    assert "loss" in info.metrics


@pytest.mark.parametrize(
    ("disk", "missing"),
    [
        (
            {"retain": {"last": 3}},
            "`best: {metric: eval_hits, mode: max}` in `retain` of tier disk",
        ),
        (
            {"retain": {"last": 3, "best": {"metric": "eval_hits"}}},
            "`best: {metric: eval_hits, mode: max}` in `retain` of tier disk",
        ),
        (
            {"retain": {"best": {"metric": "eval_loss", "mode": "max"}}},
            "`best: {metric: eval_hits, mode: max}` in `retain` of tier disk",
        ),
        (
            {"retain": KEEPS_HITS, "flush": {"every": 2}},
            "`best: {metric: eval_hits, mode: max}` in `retain`, and `flush: {every: 1}` of tier disk",
        ),
        (
            None,
            "a tier of kind file with `retain: {last: 1, best: {metric: eval_hits, mode: max}}`",
        ),
    ],
)
def test_a_best_model_that_no_tier_keeps_is_refused_with_the_line_that_is_missing(
    config: dict[str, Any], tmp_path: Path, disk: dict[str, Any] | None, missing: str
) -> None:
    if disk is None:
        del config["tiers"][1]
    else:
        config["tiers"][1] |= disk
    trainer = counted(tmp_path, [1, 2])
    with tierfall.open(config) as ckpt:
        assert f"no tier keeps the best model: write {missing}" in refused(trainer, ckpt)


def test_a_resume_does_not_look_for_the_folder_of_the_best_model(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads the best model also if nothing is left to train: the first start ended with the epoch."""
    config["tiers"][1]["retain"] = KEEPS_HITS
    with tierfall.open(config) as ckpt:
        losses_of(counted(tmp_path, [9] + [1] * 9), ckpt)
    warned: list[str] = []
    monkeypatch.setattr("transformers.trainer.logger.warning", warned.append)
    again = counted(tmp_path, [], max_steps=10)
    with tierfall.open(config) as ckpt:
        assert max(losses_of(again, ckpt)) == 10
        assert [info.step for info in ckpt.checkpoints()] == [1, 10], "nothing was saved"
    assert [text for text in warned if "best checkpoint" in text] == []
    assert again.state.best_model_checkpoint == "step 1 of tierfall"
    assert_is_step(again, config, 1)


def test_a_limit_of_saves_is_what_tiers_without_retain_keep(
    config: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the best by the metric that is named, as Trainer's own rotation. A limit of 1 deletes no folder that is not
    tierfall's."""
    config["tiers"].append({"name": "far", "kind": "file", "path": str(tmp_path / "far")})
    config["tiers"][2]["retain"] = {"last": 2}
    own = tmp_path / "out" / "checkpoint-9"
    own.mkdir(parents=True)
    limits = {"save_total_limit": 1, "load_best_model_at_end": False}
    trainer = counted(tmp_path, [1, 9, 4, 5, 6], **limits)
    with tierfall.open(config) as ckpt:
        losses_of(trainer, ckpt)
        assert trainer.args.save_total_limit == 1
    with tierfall.open(config) as ckpt:
        on = {
            tier: [x.step for x in ckpt.checkpoints() if x.on(tier) == "committed"]
            for tier in ("disk", "far")
        }
    assert on == {"disk": [2, 5], "far": [4, 5]}
    assert own.exists()
    expected = (
        "save_total_limit=1 has no effect on far: `retain` of the configuration decides there"
    )
    assert caplog.text.count(expected) == 1


class AtEnd(transformers.TrainerCallback):
    def __init__(self, act: Callable[[], None], step: int) -> None:
        self.act, self.step = act, step

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.step:
            self.act()


def best_of(folder: Path) -> Any:
    return made.plain(
        folder,
        folder / "losses",
        eval_strategy="steps",
        eval_steps=1,
        max_steps=4,
        learning_rate=1.0,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )


def test_the_trainers_own_overrides_still_run(config: dict[str, Any], tmp_path: Path) -> None:
    calls: list[str] = []

    class Own(transformers.Trainer):
        def _save_checkpoint(self, *args: Any) -> None:
            calls.append("save")
            super()._save_checkpoint(*args)

        def _load_optimizer_and_scheduler(self, *args: Any) -> None:
            super()._load_optimizer_and_scheduler(*args)
            calls.append("load")

    def own(steps: int) -> Any:
        args = made.arguments(tmp_path, max_steps=steps)
        return Own(
            model=made.model(), args=args, train_dataset=made.rows(), data_collator=made.collate
        )

    for steps in (2, 3):
        trainer = own(steps)
        with tierfall.open(config) as ckpt:
            losses_of(trainer, ckpt)
    assert calls == ["save", "save", "load", "save"]
    assert isinstance(trainer, Own)
    assert not [*tmp_path.rglob("checkpoint-*")]


def test_a_model_with_adapters_is_saved_by_what_is_trained(
    config: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("trl")
    trainer = made.tuned(tmp_path, tmp_path / "losses", lora=True)
    trainer.args.max_steps = 1
    with tierfall.open(config) as ckpt:
        losses_of(trainer, ckpt)
    saved = tierfall.load(config)
    assert saved["model"]
    assert all("lora_" in name for name in saved["model"])


def refused(trainer: Any, ckpt: tierfall.Checkpointer) -> str:
    with pytest.raises(ConfigError) as raised:
        attach(trainer, ckpt)
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("save_only_model", True, "tierfall export --only model"),
        ("push_to_hub", True, "set hub_strategy='end'"),
        ("enable_jit_checkpoint", True, "docs/hugging-face.md"),
        ("auto_find_batch_size", True, "remove them"),
    ],
)
def test_an_argument_that_tierfall_cannot_serve_is_refused(
    config: dict[str, Any], tmp_path: Path, name: str, value: Any, advice: str
) -> None:
    trainer = made.plain(tmp_path, tmp_path / "losses")
    setattr(trainer.args, name, value)
    with tierfall.open(config) as ckpt:
        assert advice in refused(trainer, ckpt)


@pytest.mark.parametrize("name", ["model", "rng"])
def test_an_extra_entry_that_would_replace_the_trainers_is_refused(
    config: dict[str, Any], tmp_path: Path, name: str
) -> None:
    """tierfall saves the random state as ``rng``, unless the state has such an entry of its own."""
    trainer = made.plain(tmp_path, tmp_path / "losses")
    average = torch.nn.Linear(2, 2)
    with tierfall.open(config) as ckpt, pytest.raises(ConfigError, match=f"rename {name}"):
        attach(trainer, ckpt, extra={name: average, "average": average})


def test_every_problem_is_reported_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = made.plain(tmp_path, tmp_path / "losses")
    trainer.args.save_only_model, trainer.is_deepspeed_enabled = True, True
    with tierfall.open(config) as ckpt:
        message = refused(trainer, ckpt)
    assert "save_only_model" in message
    assert "tierfall.integrations.deepspeed" in message


def test_fsdp1_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = made.plain(tmp_path, tmp_path / "losses")
    trainer.is_fsdp_enabled = True
    plugin = SimpleNamespace(fsdp_version=1)
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    with tierfall.open(config) as ckpt:
        assert "{'fsdp_version': 2}" in refused(trainer, ckpt)


@pytest.mark.parametrize("version", ["4.57.6", "5.17.0", "6.0.0"])
def test_another_version_is_refused_with_those_that_are_supported(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    trainer = made.plain(tmp_path, tmp_path / "losses")
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with tierfall.open(config) as ckpt:
        message = refused(trainer, ckpt)
    assert (
        message
        == f"transformers {version} is installed: not supported; pip install 'transformers>=5.18,<6'"
    )


def test_a_hub_that_gets_the_end_alone_is_allowed(config: dict[str, Any], tmp_path: Path) -> None:
    trainer = made.plain(tmp_path, tmp_path / "losses", hub_strategy="end")
    trainer.args.push_to_hub = True
    with tierfall.open(config) as ckpt:
        assert attach(trainer, ckpt) is None


def test_a_new_run_begins_with_a_folder_of_trainers_own_format_and_no_other_does(
    config: dict[str, Any], tmp_path: Path
) -> None:
    made.plain(tmp_path, tmp_path / "whole", max_steps=4, save_steps=2).train()
    own = str(tmp_path / "out" / "checkpoint-2")
    trainer = made.plain(tmp_path, tmp_path / "rest", max_steps=4)
    with tierfall.open(config) as ckpt:
        trainer.train(resume_from_checkpoint=attach(trainer, ckpt) or own)
        assert ckpt.checkpoints()[-1].step == 4
    rest = (tmp_path / "rest").read_text()
    assert rest.startswith("3 0 ")
    assert (tmp_path / "whole").read_text().endswith(rest)
    trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=5)
    with tierfall.open(config) as ckpt:
        attach(trainer, ckpt)
        with pytest.raises(ConfigError, match=f"attach.* once; not {re.escape(own)}"):
            trainer.train(resume_from_checkpoint=own)


def test_a_train_that_would_begin_anew_is_refused_before_its_first_step(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """As when what attach returned was not passed on, or in a notebook whose cell is run again."""
    trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=2)
    with tierfall.open(config) as ckpt:
        trainer.train(resume_from_checkpoint=attach(trainer, ckpt))
        before = (tmp_path / "losses").read_text()
        with pytest.raises(ConfigError, match=r"pass what attach\(trainer, ckpt\) returns, once"):
            trainer.train()
        trainer.args.max_steps = 3
        attach(trainer, ckpt)
        with pytest.raises(ConfigError, match=r"once; not False. To begin anew, open another run"):
            trainer.train(resume_from_checkpoint=False)
        with pytest.raises(ConfigError, match=r"pass what attach\(trainer, ckpt\) returns, once"):
            trainer.train()
        assert (tmp_path / "losses").read_text() == before
        trainer.train(resume_from_checkpoint=True)
        assert trainer.state.global_step == 3


class AsksAtEndOfEpoch(transformers.TrainerCallback):
    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        state.log_history.append({"own": 1})  # without a step, as Trainer's entries have it
        control.should_save = True


def test_a_step_that_two_callbacks_ask_for_is_saved_once(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """The last step of an epoch; a run that resumed from it too."""
    for steps, saved in ((10, [5, 10]), (14, [5, 10, 14])):
        trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=steps, save_steps=5)
        trainer.add_callback(AsksAtEndOfEpoch())
        with tierfall.open(config) as ckpt:
            losses_of(trainer, ckpt)
            assert [info.step for info in ckpt.checkpoints()] == saved


def test_the_batches_that_are_skipped_are_those_that_were_trained(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """A sampler that draws their order from the random state of torch, in the first epoch: as Trainer itself."""
    given: dict[str, Any] = {"train_sampling_strategy": "group_by_length", "max_steps": 10}
    with tierfall.open(config) as ckpt:
        losses_of(made.plain(tmp_path, tmp_path / "whole", **given), ckpt)
    with tierfall.open(config) as ckpt:
        losses_of(made.plain(tmp_path, tmp_path / "rest", **given), ckpt, step=4)
    rest = (tmp_path / "rest").read_text()
    assert rest.startswith("5 0 ")
    assert (tmp_path / "whole").read_text().endswith(rest)


def test_a_step_that_was_deleted_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    with tierfall.open(config) as ckpt:
        losses_of(made.plain(tmp_path, tmp_path / "losses", max_steps=2), ckpt)
    trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=3)
    with tierfall.open(config) as ckpt:
        with pytest.raises(RestoreError, match="step 7"):
            attach(trainer, ckpt, step=7)
        found = attach(trainer, ckpt, step=1)
        ckpt.delete(1)
        with pytest.raises(RestoreError, match="step 1"):
            trainer.train(resume_from_checkpoint=found)


@pytest.mark.parametrize("damaged", [[14], [10, 11, 12, 13, 14]])
def test_a_newest_checkpoint_that_is_damaged_in_every_copy_is_passed_over(
    config: dict[str, Any],
    tmp_path: Path,
    memory: Path,
    damaged: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The newest is the last step, after which nothing is left to train; step 9 is of the epoch before it."""
    with tierfall.open(config) as ckpt:
        whole = losses_of(made.plain(tmp_path, tmp_path / "whole"), ckpt)
    for step in damaged:
        made.damage(tmp_path, memory, step)
    caplog.clear()
    with tierfall.open(config) as ckpt:
        trainer = made.plain(tmp_path, tmp_path / "rest")
        assert losses_of(trainer, ckpt) == whole
        assert ckpt.checkpoints()[-1].step == made.STEPS
    rest = (tmp_path / "rest").read_text()
    assert rest.startswith(f"{damaged[0]} 0 ")
    assert (tmp_path / "whole").read_text().endswith(rest)
    assert f"step {made.STEPS}@1 is skipped: chunk" in caplog.text


def test_a_step_that_was_named_and_is_damaged_is_an_error_that_says_how_to_take_another(
    config: dict[str, Any], tmp_path: Path, memory: Path
) -> None:
    with tierfall.open(config) as ckpt:
        losses_of(made.plain(tmp_path, tmp_path / "losses", max_steps=2), ckpt)
    made.damage(tmp_path, memory, 2)
    trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=3)
    with tierfall.open(config) as ckpt:
        found = attach(trainer, ckpt, step=2)
        with pytest.raises(TierfallError) as raised:
            trainer.train(resume_from_checkpoint=found)
        assert "attach(trainer, ckpt, step=N)" in "".join(raised.value.__notes__)
    with tierfall.open(config) as ckpt:
        assert list(losses_of(trainer, ckpt, step=1)) == [1, 2, 3]


def test_the_temporary_folder_is_deleted_once_it_was_read_or_with_the_trainer(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with tierfall.open(config) as ckpt:
        losses_of(made.plain(tmp_path, tmp_path / "losses", max_steps=1), ckpt)
    trainer = made.plain(tmp_path, tmp_path / "losses", max_steps=2)
    with tierfall.open(config) as ckpt:
        read = attach(trainer, ckpt)
        assert read is not None
        trainer.train(resume_from_checkpoint=read)
        assert not os.path.exists(read)
        with pytest.raises(ConfigError, match=r"pass what attach\(trainer, ckpt\) returns, once"):
            trainer.train(resume_from_checkpoint=read)
        unread = attach(trainer, ckpt)
        assert unread is not None
        assert os.path.exists(unread)
    del trainer
    gc.collect()
    assert not os.path.exists(unread)


def test_a_checkpoint_of_another_program_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"model": made.model()}, block=True)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="trainer"):
        attach(made.plain(tmp_path, tmp_path / "losses"), ckpt)


def accelerated(stateful: bool) -> tuple[Any, ...]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    how = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
    accelerator = Accelerator(cpu=True, dataloader_config=how)
    model = made.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(
        made.rows(), batch_size=4, shuffle=True, collate_fn=made.collate
    )
    return accelerator, *accelerator.prepare(model, optimizer, schedule, loader)


@pytest.mark.parametrize("stateful", [True, False])
def test_an_accelerate_loop_resumes_exactly(config: dict[str, Any], stateful: bool) -> None:
    """As docs/hugging-face.md shows it: within an epoch of 10 batches."""

    def run(ckpt: tierfall.Checkpointer, last: int) -> dict[int, str]:
        transformers.set_seed(3)
        accelerator, model, optimizer, schedule, loader = accelerated(stateful)
        state = state_of(accelerator)
        report = ckpt.restore(state)
        first = report.step if report else 0
        batches = loader if stateful else accelerator.skip_first_batches(loader, first)
        found = {}
        for step, batch in enumerate(batches, first + 1):
            if report and step == first + 1:
                ckpt.restore({}, step=first, only=["rng"])
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            ckpt.save(step, state, block=True)
            found[step] = loss.item().hex()
            if step == last:
                break
        return found

    with tierfall.open({**config, "run": "whole"}) as ckpt:
        whole = run(ckpt, 7)
    with tierfall.open(config) as ckpt:
        assert run(ckpt, 4) == {step: whole[step] for step in range(1, 5)}
    with tierfall.open(config) as ckpt:
        assert run(ckpt, 7) == {step: whole[step] for step in range(5, 8)}


def test_the_state_of_an_accelerator_names_what_was_prepared() -> None:
    accelerator, model, optimizer, schedule, _ = accelerated(False)
    second = accelerator.prepare(torch.nn.Linear(2, 2))
    custom = torch.nn.Linear(2, 2)
    accelerator.register_for_checkpointing(custom)
    state = state_of(accelerator)
    assert {name: state[name] for name in ("model", "model_1", "custom")} == {
        "model": model,
        "model_1": second,
        "custom": custom,
    }
    assert state["optimizer"] is optimizer.optimizer
    assert state["scheduler"] is schedule.scheduler
    assert set(state) == {"model", "model_1", "optimizer", "scheduler", "custom"}


def test_deepspeed_in_an_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tierfall\.integrations\.deepspeed"):
        state_of(SimpleNamespace(distributed_type="DEEPSPEED"))
