"""Hugging Face: ``trainer.train(resume_from_checkpoint=attach(trainer, ckpt))``.

A Trainer, one of TRL too, then saves to a Checkpointer in place of ``checkpoint-N`` folders.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import random
import shutil
import tempfile
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import Trainer  # type: ignore[import-not-found]
from transformers.trainer_callback import ExportableState  # type: ignore[import-not-found]

from tierfall import Checkpointer, RestoreReport, item
from tierfall.errors import ConfigError, IntegrityError, RestoreError
from tierfall.integrations import frameworks
from tierfall.integrations.accelerate import weights_of

logger = logging.getLogger("tierfall")
__all__ = ["attach"]


def attach(
    trainer: Any,
    ckpt: Checkpointer,
    *,
    step: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str | None:
    """Let a Trainer save to ``ckpt``; return what ``train`` resumes from: the newest checkpoint, or that of ``step``.

    The result is a temporary folder that names the step, or None where the run has no checkpoint. ``train`` restores
    the state. ``extra`` are further entries of it, such as a reference model that changes. All ranks call this.

    Raises ConfigError for another version of transformers and for arguments of the Trainer that are not supported,
    RestoreError where the checkpoint cannot be read or is not one of a Trainer.
    """
    frameworks.check_version("transformers")
    if found := "; ".join(_problems(trainer, extra or {}, ckpt)):
        raise ConfigError(f"attach: {found}")
    frameworks.keep_last(ckpt, trainer.args.save_total_limit, _best_of(trainer.args))
    frameworks.note_evaluation(ckpt, 0 if trainer.args.eval_strategy == "no" else math.inf)
    kept = TrainerJson(trainer)
    entry = item(kept, on_resize="replicate")
    restored = ckpt.restore({"trainer": entry}, step=step, only=["trainer"])
    own = _Attached(
        ckpt=ckpt,
        extra={"trainer": entry, **(extra or {})},
        kept=kept,
        restored=restored,
        step=step,
    )
    own.begin(trainer)
    if not isinstance(trainer, _Resumable):
        kind = type(trainer)
        # Behind the trainer's own class, whose overrides still run, and before Trainer.
        bases = (_Resumable,) if kind is Trainer else (kind, _Resumable)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    trainer.tierfall = own
    return own.folder


class _Resumable(Trainer):  # type: ignore[misc]
    """The methods by which a Trainer saves and loads, on ``tierfall``, which is _Attached."""

    def _saved(self) -> dict[str, Any]:
        """Return the arguments of a save."""
        step, best = self.state.global_step, self.state.best_global_step
        # Without this, Trainer loads no best model.
        self.state.best_model_checkpoint = best and f"step {best} of tierfall"
        state = {
            "model": weights_of(self.model),
            "optimizer": getattr(self.optimizer, "optimizer", self.optimizer),  # not accelerate's
            "scheduler": self.lr_scheduler,
            "scaler": self.accelerator.scaler,
            **self.tierfall.extra,
        }
        return {"step": step, "state": state, "metrics": _metrics_at(step, self.state.log_history)}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise ConfigError("train: a hyperparameter search has several runs; tierfall saves one")
        frameworks.meet_all_ranks(self.tierfall.ckpt, "save_checkpoint")  # store_flos is collective
        self.store_flos()
        if self.state.global_step != self.tierfall.last:  # two callbacks may ask for one step
            self.tierfall.ckpt.save(**self._saved())
            self.tierfall.last = self.state.global_step

    def _maybe_log_save_evaluate(self, *args: Any, **more: Any) -> None:
        if self.control.should_evaluate:
            frameworks.note_evaluation(self.tierfall.ckpt, self.state.global_step)
        super()._maybe_log_save_evaluate(*args, **more)
        if self.args.save_strategy == "no":
            self.tierfall.ckpt.maybe_save(**self._saved())

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **more: Any) -> Any:
        # Not called by ``trainer.train(attach(trainer, ckpt))``: Python looks up ``train`` first.
        return super().train(self.tierfall.resumes_from(resume_from_checkpoint), *args, **more)

    def _load_from_checkpoint(self, folder: str, model: Any = None) -> None:
        if self.tierfall.folder is None:  # a new run begins with a folder of Trainer's own format
            super()._load_from_checkpoint(folder, model)

    def _init_training_state(self, max_steps: int, *args: Any) -> Any:
        """Restore before Trainer knows where it begins: where the newest checkpoint is damaged, at an older one."""
        begins, read = super()._init_training_state(max_steps, *args), self.tierfall.kept.restored
        self.tierfall.begun = True
        *_, folder, _ = args
        if self.tierfall.restored is None or folder is None:
            return begins
        self.tierfall.model, _ = super()._prepare_for_training(max_steps, None, folder)
        if self.tierfall.kept.restored != read:
            begins = super()._init_training_state(max_steps, *args)
        shutil.rmtree(folder)  # a kill leaves none then
        return begins

    def _prepare_for_training(self, max_steps: int, loader: Any, folder: str | None) -> Any:
        model, self.tierfall.model = self.tierfall.model, None
        if model is None:
            return super()._prepare_for_training(max_steps, loader, folder)
        self.callback_handler.train_dataloader = loader
        return model, loader

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.tierfall.restored is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:  # the model too, which is prepared by now
            self.tierfall.restore(self._saved()["state"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.tierfall.restored is None or checkpoint is None:
            super()._load_rng_state(checkpoint)
        else:  # last: batches that were skipped drew from it
            frameworks.restore_random(self.tierfall.ckpt, self.tierfall.restored)

    def _load_best_model(self) -> None:
        state = {"model": weights_of(self.model)}
        self.tierfall.load_best(_best_of(self.args), self.state.best_global_step, state)

    def _finalize_training(self, *args: Any, **more: Any) -> Any:
        # With a limit of 1, Trainer deletes folders here that a training without tierfall has left.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **more)
        finally:
            self.args.save_total_limit = limit


class TrainerJson:
    """What ``trainer_state.json`` holds, as an object of the state: it is converted by a save, and at no other step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.restored = ""

    def state_dict(self) -> dict[str, str]:
        callbacks = (*self._trainer.callback_handler.callbacks, self._trainer.control)
        exported = [x for x in callbacks if isinstance(x, ExportableState)]
        # ``vars``, since ``asdict`` copies each entry of the log.
        return {"json": json.dumps(vars(replace(self._trainer.state, stateful_callbacks=exported)))}

    def load_state_dict(self, values: dict[str, str]) -> None:
        self.restored = values["json"]


@dataclass(slots=True, kw_only=True)
class _Attached:
    """What a Trainer saves to, and the checkpoint that is ``restored``; ``folder`` leads to it. None in a new run."""

    ckpt: Checkpointer
    extra: dict[str, Any]
    kept: TrainerJson
    restored: RestoreReport | None
    step: int | None  # the step that attach was given
    folder: str | None = None
    begun: bool = False
    last: int | None = None  # the step that was saved or restored last
    model: Any = None  # as it was prepared for the restore

    def begin(self, trainer: Any) -> None:
        """Begin a new run, or make the folder that Trainer resumes from, which is deleted with the Trainer at the
        latest."""
        if self.restored is None:
            self.ckpt.begin()
            return
        self.folder = tempfile.mkdtemp(prefix="tierfall-", suffix=f"-{self.restored.step}")
        weakref.finalize(trainer, shutil.rmtree, self.folder, ignore_errors=True)
        self.write_json()

    def resumes_from(self, folder: Any) -> Any:
        """Return what a ``train`` that is given ``folder`` resumes from. Raises ConfigError if it would begin anew."""
        found = self.folder if folder is True else folder or None
        if self.begun or (self.folder is not None and found != self.folder):
            raise ConfigError(
                f"train: the run has checkpoints: pass what attach(trainer, ckpt) returns, once; not {folder}. To "
                "begin anew, open another run, or this one with fresh=True"
            )
        return found

    def write_json(self) -> None:
        """Write what Trainer reads of the checkpoint. Trainer looks for the folder of the best one: there is none."""
        assert self.folder is not None
        found = json.loads(self.kept.restored) | {"best_model_checkpoint": None}
        Path(self.folder, "trainer_state.json").write_text(json.dumps(found))

    def restore(self, state: dict[str, Any]) -> None:
        """Restore all but the random state, from which Trainer draws until the first batch: the newest checkpoint that
        is whole, or the step that was named."""
        at = self.restored
        assert at is not None
        step, attempt = (None, None) if self.step is None else (at.step, at.attempt)
        drawn = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
        try:
            found = self.ckpt.restore(state, step=step, attempt=attempt)
        except (IntegrityError, RestoreError) as error:
            error.add_note(
                "attach(trainer, ckpt, step=N) resumes from step N: `tierfall ls` lists what there is"
            )
            raise
        assert found is not None  # attach found one
        # ``skip=["rng"]`` is an error where another number of ranks saved: it has no random state for these.
        random.setstate(drawn[0])
        numpy.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        self.restored, self.last = found, found.step
        self.write_json()
        self.ckpt.begin()  # no warning of the loader: its order follows from seed and step

    def load_best(self, best: frameworks.Best, named: int, state: dict[str, Any]) -> None:
        """Restore the best model that there is. Trainer names the step that was the best, whether it was saved or not;
        of equal ones, retention keeps the newest."""
        step = frameworks.best_step(self.ckpt, best, named)
        if step is None:
            missing = frameworks.missing_for(self.ckpt, best)
            raise RestoreError(
                f"load_best_model_at_end: no checkpoint has the metric {best.metric}: save at steps that are evaluated"
                + (missing and f", and write {missing}")
            )
        if step != named:
            logger.warning(
                "load_best_model_at_end: there is no checkpoint of step %d: that of step %d is loaded, the best by %s "
                "that there is",
                named,
                step,
                best.metric,
            )
        self.ckpt.restore(state, step=step, only=["model"])


def _metrics_at(step: int, log: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers that were logged at a step. Entries of a callback's own may have no step."""
    named = (entry for entry in reversed(log) if "step" in entry)
    entries = [*itertools.takewhile(lambda entry: entry["step"] == step, named)]
    logged = ((k, x) for entry in reversed(entries) for k, x in entry.items() if k != "step")
    return {k: x for k, x in logged if isinstance(x, int | float)}


def _best_of(args: Any) -> frameworks.Best | None:
    """Return what the best model is by, if a metric is named for it."""
    if args.metric_for_best_model is None:
        return None
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    return frameworks.Best.by(name, "max" if args.greater_is_better else "min")


def _problems(trainer: Any, extra: Collection[str], ckpt: Checkpointer) -> Iterator[str]:
    """Yield what has to be changed before ``attach`` accepts a Trainer, and further entries of these names."""
    args = trainer.args
    best = _best_of(args) if args.load_best_model_at_end else None
    if best is not None and (missing := frameworks.missing_for(ckpt, best)):
        yield f"load_best_model_at_end: no tier keeps the best model: write {missing}"
    if taken := sorted(
        {"model", "optimizer", "scheduler", "scaler", "trainer", "rng"}.intersection(extra)
    ):
        yield f"extra has entries of the Trainer's own names: rename {', '.join(taken)}"
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed trains: use tierfall.integrations.deepspeed"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield "FSDP1 shards the model: set fsdp_config={'fsdp_version': 2}"
    if args.save_only_model:
        yield "save_only_model leaves nothing to resume from: remove it; `tierfall export --only model` writes weights"
    if args.push_to_hub and args.hub_strategy != "end":
        yield "hub_strategy has no folders to push: set hub_strategy='end'"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint and tierfall both act on SIGTERM: remove it; see docs/hugging-face.md"
    if args.auto_find_batch_size or getattr(args, "use_adaptive_entropy", False):
        yield "auto_find_batch_size and use_adaptive_entropy rely on checkpoint folders: remove them"
