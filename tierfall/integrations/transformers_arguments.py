"""The arguments of a Trainer that ``attach`` reads, and those that rely on Trainer's own checkpoint folders."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tierfall import Checkpointer
from tierfall.integrations.keeping import Best, missing_for


def best_of(args: Any) -> Best | None:
    """Return what the best model is by, if a metric is named for it."""
    if args.metric_for_best_model is None:
        return None
    name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    return Best.by(name, "max" if args.greater_is_better else "min")


def problems(trainer: Any, extra: Collection[str], ckpt: Checkpointer) -> Iterator[str]:
    """Yield what has to be changed before ``attach`` accepts a Trainer, and further entries of these names."""
    args = trainer.args
    best = best_of(args) if args.load_best_model_at_end else None
    if best is not None and (missing := missing_for(ckpt, best)):
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
