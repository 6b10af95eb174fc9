"""What ``attach`` adds to a Trainer, and which of a Trainer's arguments rely on its own checkpoint folders."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.trainer_callback import ExportableState  # type: ignore[import-not-found]

from tierfall import Checkpointer, RestoreReport
from tierfall.errors import ConfigError, IntegrityError, RestoreError


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
class Attached:
    """What a Trainer saves to, and the checkpoint that is ``restored``; ``folder`` leads to it. None in a new run."""

    ckpt: Checkpointer
    extra: dict[str, Any]
    kept: TrainerJson
    restored: RestoreReport | None
    folder: str | None
    step: int | None  # the step that attach was given
    begun: bool = False
    last: int | None = None  # the step that was saved or restored last
    model: Any = None  # as it was prepared for the restore

    def resumes_from(self, folder: Any) -> Any:
        """Return what a ``train`` that is given ``folder`` resumes from. Raises ConfigError if it would begin anew."""
        folder = self.folder if folder is True else folder or None
        if self.begun or (self.folder is not None and folder != self.folder):
            raise ConfigError(
                f"train: the run has checkpoints: pass what attach(trainer, ckpt) returns, once; not {folder}"
            )
        return folder

    def write_json(self) -> None:
        """Write what Trainer reads of the checkpoint."""
        assert self.folder is not None
        Path(self.folder, "trainer_state.json").write_text(self.kept.restored)

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


def problems(trainer: Any, extra: Collection[str]) -> Iterator[str]:
    """Yield what has to be changed before ``attach`` accepts a Trainer, and further entries of these names."""
    args = trainer.args
    if taken := sorted(
        {"model", "optimizer", "scheduler", "scaler", "trainer", "rng"}.intersection(extra)
    ):
        yield f"extra has entries of the Trainer's own names: rename {', '.join(taken)}"
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
