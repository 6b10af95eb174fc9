"""Hugging Face: ``trainer.train(resume_from_checkpoint=attach(trainer, ckpt))``.

A Trainer, one of TRL too, then saves to a Checkpointer in place of ``checkpoint-N`` folders.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from typing import Any

from transformers import Trainer  # type: ignore[import-not-found]

from tierfall import Checkpointer, item
from tierfall.errors import ConfigError
from tierfall.integrations import frameworks, keeping
from tierfall.integrations.accelerate import weights_of
from tierfall.integrations.transformers_arguments import best_of, problems
from tierfall.integrations.transformers_state import Attached, TrainerJson, metrics_at

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
    if found := "; ".join(problems(trainer, extra or {}, ckpt)):
        raise ConfigError(f"attach: {found}")
    keeping.keep_last(ckpt, trainer.args.save_total_limit, best_of(trainer.args))
    keeping.note_evaluation(ckpt, 0 if trainer.args.eval_strategy == "no" else math.inf)
    kept = TrainerJson(trainer)
    entry = item(kept, on_resize="replicate")
    restored = ckpt.restore({"trainer": entry}, step=step, only=["trainer"])
    own = Attached(
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
    """The methods by which a Trainer saves and loads, on ``tierfall``, which is Attached."""

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
        return {"step": step, "state": state, "metrics": metrics_at(step, self.state.log_history)}

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
            keeping.note_evaluation(self.tierfall.ckpt, self.state.global_step)
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
        self.tierfall.load_best(best_of(self.args), self.state.best_global_step, state)

    def _finalize_training(self, *args: Any, **more: Any) -> Any:
        # With a limit of 1, Trainer deletes folders here that a training without tierfall has left.
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            return super()._finalize_training(*args, **more)
        finally:
            self.args.save_total_limit = limit
