"""Hugging Face: ``trainer.train(resume_from_checkpoint=attach(trainer, ckpt))``, and ``state_of`` for accelerate loops.

A Trainer, one of TRL too, then saves to a Checkpointer in place of ``checkpoint-N`` folders.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tierfall import Checkpointer, item
from tierfall.errors import ConfigError, RestoreError

try:
    import transformers  # type: ignore[import-not-found]
    from transformers import Trainer
except ModuleNotFoundError:  # state_of needs accelerate alone
    Trainer = object

__all__ = ["attach", "state_of"]
OLDEST, NEWEST = (5, 18), (5, 99)


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
    if problems := "; ".join(_problems(trainer)):
        raise ConfigError(f"attach: {problems}")
    link = _Link(trainer, ckpt, extra or {})
    if report := ckpt.restore({"trainer": link.entry}, step=step, only=["trainer"]):
        root = tempfile.mkdtemp(prefix="tierfall-")
        weakref.finalize(trainer, shutil.rmtree, root, ignore_errors=True)
        folder = Path(root, f"checkpoint-{report.step}")
        folder.mkdir()
        (folder / "trainer_state.json").write_text(link.text)
        link.step, link.folder = report.step, str(folder)
    if not isinstance(trainer, _Resumable):
        kind = type(trainer)
        # Behind the trainer's own class, whose overrides still run, and before Trainer.
        bases = (_Resumable,) if kind is Trainer else (kind, _Resumable)
        trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
    trainer.tierfall = link
    return link.folder


def state_of(accelerator: Any) -> dict[str, Any]:
    """Return what an Accelerator has prepared and registered, as a state for ``ckpt.save`` and ``ckpt.restore``.

    Entries: ``model``, ``optimizer``, ``scheduler``, ``scaler``, ``loader`` (a StatefulDataLoader), ``custom``; a
    second model has the number 1 appended to its name. Raises ConfigError with DeepSpeed.
    """
    if accelerator.distributed_type == "DEEPSPEED":
        raise ConfigError("state_of: DeepSpeed trains: use tierfall.integrations.deepspeed")
    loaders = [x for x in accelerator._dataloaders if getattr(x, "use_stateful_dataloader", False)]
    found: dict[str, list[Any]] = {
        "model": [*map(_weights, accelerator._models)],
        "optimizer": [x.optimizer for x in accelerator._optimizers],
        "scheduler": [x.scheduler for x in accelerator._schedulers],
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
        "loader": loaders,
        "custom": accelerator._custom_objects,
    }
    return {
        f"{k}_{n}" if n else k: x for k, several in found.items() for n, x in enumerate(several)
    }


def _problems(trainer: Any) -> Iterator[str]:
    args, installed = trainer.args, transformers.__version__
    if not OLDEST <= tuple(map(int, installed.split(".")[:2])) <= NEWEST:
        yield f"transformers {installed} is installed, supported are {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.x"
    if trainer.is_deepspeed_enabled:
        yield "DeepSpeed trains: use tierfall.integrations.deepspeed"
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version != 2:
        yield "FSDP1 shards the model: set fsdp_config={'fsdp_version': 2}"
    if args.save_total_limit:
        yield "save_total_limit has no folders to delete: remove it, and set `retain: {last: N}` of the tiers"
    if args.save_only_model:
        yield "save_only_model leaves nothing to resume from: remove it; `tierfall export --only model` writes weights"
    if args.push_to_hub and args.hub_strategy != "end":
        yield "hub_strategy has no folders to push: set hub_strategy='end'"
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint and tierfall both act on SIGTERM: remove it; see docs/hugging-face.md"
    if args.auto_find_batch_size or getattr(args, "use_adaptive_entropy", False):
        yield "auto_find_batch_size and use_adaptive_entropy rely on checkpoint folders: remove them"


def _weights(model: Any) -> Any:
    """Return what is saved of a model: of one with PEFT adapters, the parameters that are trained."""
    if not hasattr(model, "peft_config"):
        return model
    trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
    return {name.replace("_checkpoint_wrapped_module.", ""): x for name, x in trained}


class _Link:
    """From a Trainer to its Checkpointer; as an entry of the state, what Trainer keeps in ``trainer_state.json``."""

    step, ranks, text, data = 0, 0, "", None
    folder: str | None = None

    def __init__(self, trainer: Any, ckpt: Checkpointer, extra: Mapping[str, Any]) -> None:
        self.trainer, self.ckpt, self.extra = weakref.proxy(trainer), ckpt, extra
        self.entry = item(self, on_resize="replicate")

    def state_dict(self) -> dict[str, Any]:
        kinds = transformers.trainer_callback.ExportableState
        callbacks = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        now = transformers.TrainerState(
            stateful_callbacks=[x for x in callbacks if isinstance(x, kinds)]
        )
        new = {"stateful_callbacks": now.stateful_callbacks, "best_model_checkpoint": None}
        text = json.dumps(asdict(self.trainer.state) | new)
        return {"json": text, "ranks": self.trainer.args.world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.text, self.ranks = state["json"], state["ranks"]


class _Resumable(Trainer):  # type: ignore[misc]
    """The methods by which a Trainer saves and loads, on a Checkpointer."""

    tierfall: _Link

    def _saved(self) -> dict[str, Any]:
        """Return the arguments of a save."""
        link, step, best = self.tierfall, self.state.global_step, self.state.best_global_step
        link.data = (
            self.callback_handler.train_dataloader
        )  # its order follows from seed and step: no warning
        self.state.best_model_checkpoint = (
            best and f"step {best} of tierfall"
        )  # else Trainer loads no best model
        state = {
            "model": _weights(self.model),
            "optimizer": getattr(
                self.optimizer, "optimizer", self.optimizer
            ),  # without accelerate's wrapper
            "scheduler": self.lr_scheduler,
            "trainer": link.entry,
            **link.extra,
        }
        if getattr(self.accelerator, "scaler", None) is not None:
            state["scaler"] = self.accelerator.scaler
        logged = [x for x in self.state.log_history[-9:] if x["step"] == step]
        metrics = {k: x for entry in logged for k, x in entry.items() if isinstance(x, float)}
        return {"step": step, "state": state, "metrics": metrics}

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise ConfigError("train: a hyperparameter search has several runs; tierfall saves one")
        self.store_flos()
        self.tierfall.ckpt.save(**self._saved())

    def _maybe_log_save_evaluate(self, *args: Any, **more: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **more)
        if self.args.save_strategy == "no":
            self.tierfall.ckpt.maybe_save(**self._saved())

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if resume_from_checkpoint != self.tierfall.folder:
            raise ConfigError(
                f"train: {resume_from_checkpoint} is not what attach returned: pass resume_from_checkpoint="
                "attach(trainer, ckpt). `tierfall import PATH --as-step N` reads a folder of Trainer's own format"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:  # the model too, which is prepared by now
            self.tierfall.ckpt.restore(self._saved()["state"], step=self.tierfall.step)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.tierfall.ranks == self.args.world_size:
            # Last: batches that were skipped drew from it.
            self.tierfall.ckpt.restore({}, step=self.tierfall.step, only=["rng"])

    def _load_best_model(self) -> None:
        best, state = self.state.best_global_step, {"model": _weights(self.model)}
        try:
            self.tierfall.ckpt.restore(state, step=best, only=["model"])
        except RestoreError as error:
            error.add_note(
                "load_best_model_at_end: `retain: {best: {metric: eval_loss}}` of a tier keeps it"
            )
            raise
