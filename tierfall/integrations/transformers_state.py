"""The state of a Trainer as JSON, and which of a Trainer's arguments rely on its own checkpoint folders."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from transformers.trainer_callback import ExportableState  # type: ignore[import-not-found]


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


def problems(trainer: Any, extra: Collection[str]) -> Iterator[str]:
    """Yield what has to be changed before ``attach`` accepts a Trainer, and further entries of these names."""
    args = trainer.args
    if taken := sorted(
        {"model", "optimizer", "scheduler", "scaler", "trainer"}.intersection(extra)
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
