"""Lightning: ``Trainer(plugins=[TierfallIO("tiers.yaml")])`` saves to tierfall's tiers, and resumes from them.

Lightning's callbacks decide when to save, and look for paths. At each path that they save to, there is a pointer.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint import state_dict as sharded

import tierfall
from tierfall.errors import ConfigError

__all__ = ["TierfallIO"]
ENTRY = "lightning"
LOW, HIGH = (2, 6), (3, 0)
_INSTEAD = {
    FSDPStrategy: "ModelParallelStrategy and torch.distributed.fsdp.fully_shard (FSDP2)",
    DeepSpeedStrategy: "tierfall.integrations.deepspeed, without Lightning",
}


class TierfallIO(CheckpointIO, Callback):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer to the tiers of ``config``, by all ranks, and loads them.

    ``config``, ``run`` and ``fresh`` are those of ``tierfall.open``, which each ``fit`` calls. Raises ConfigError where
    this version of Lightning is not supported.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | tierfall.Config,
        *,
        run: str | None = None,
        fresh: bool = False,
    ) -> None:
        version = importlib.metadata.version("lightning")
        if not LOW <= tuple(map(int, version.split(".")[:2])) < HIGH:
            raise ConfigError(f"TierfallIO supports lightning >=2.6,<3; this is {version}")
        self._config, self._run, self._fresh = config, run, fresh
        self._ckpt: tierfall.Checkpointer | None = None
        self._trainer: Any = None
        self._restored: tierfall.RestoreReport | None = None
        self._step: int | None = None  # the last that was saved or loaded
        self._renew = False
        self._late: list[Any] = []  # paths that wait for the end of the epoch

    # Called by Lightning, on all ranks -------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the strategy save by all ranks; ConfigError for a strategy that cannot."""
        strategy = trainer.strategy
        for kind, instead in _INSTEAD.items():
            if isinstance(strategy, kind):
                raise ConfigError(f"TierfallIO does not support {kind.__name__}: use {instead}")
        self._trainer, strategy.checkpoint_io = trainer, self
        strategy.save_checkpoint, strategy.remove_checkpoint = self._save, self._remove
        if isinstance(strategy, ModelParallelStrategy):
            strategy.load_checkpoint = self._load_sharded

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the random state, from which the loader's new iterator has drawn since it was loaded."""
        if self._restored is None:
            self._opened().begin()
        else:
            self._restore_random(self._restored)
            self._renew = not trainer.fit_loop.restarted_mid_epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the iterator of the first epoch again, as it was: after its sampler's epoch was set."""
        if self._renew and self._restored is not None:
            self._restore_random(self._restored)
            iter(trainer.fit_loop._data_fetcher)
        self._renew = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was to be saved at the last batch."""
        while self._late:
            trainer.save_checkpoint(self._late.pop(0))

    def load_checkpoint(self, path: Any, *args: Any, **more: Any) -> dict[str, Any]:
        """Load what the pointer at ``path`` leads to; if its name begins with ``last``, the newest checkpoint."""
        pointer = _pointer_at(path)
        if self._trainer is None or self._trainer.state.fn != "fit":
            loaded: dict[str, Any] = tierfall.load(path)[ENTRY]
            return loaded
        newest = Path(path).name.startswith("last")
        step, attempt = (None, None) if newest else (pointer.step, pointer.attempt)
        found = self._opened().load(step, attempt=attempt)
        if found is None:
            raise ConfigError(f"TierfallIO: {path} names {pointer}, and no tier has a checkpoint")
        self._restored, state = found
        self._step = self._restored.step
        loaded = state[ENTRY]
        return loaded

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Refuse: Lightning calls a plugin that is no callback on rank 0 alone."""
        raise ConfigError(
            "TierfallIO has to be a callback of the Trainer, so that all ranks save, and tierfall's entry points are "
            "not installed: pass io = TierfallIO(...) as Trainer(plugins=[io], callbacks=[io])"
        )

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a pointer. Its checkpoint stays as long as ``retain`` keeps it."""
        if os.path.islink(path):
            os.unlink(path)
        elif _pointer_at(path):
            shutil.rmtree(path)

    def teardown(self, *args: Any, **more: Any) -> None:
        """Close the run: at the end of a fit, or once it has failed."""
        ckpt, self._ckpt = self._ckpt, None
        self._step, self._restored, self._late = None, None, []
        if ckpt is not None:
            ckpt.close()

    # What the strategy calls in place of its own methods -------------------------------------------------

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        if self._ckpt is None:
            raise ConfigError(f"TierfallIO: {path} is saved outside of fit: the run is closed")
        loop, step = self._trainer.fit_loop, checkpoint["global_step"]
        if not checkpoint.get("state_dict") or "optimizer_states" not in checkpoint:
            raise ConfigError(
                f"TierfallIO: {path} has no whole state (save_weights_only, or save_distributed_checkpoint=False), so "
                "that no run can continue from it: save all, and write weights by tierfall export"
            )
        progress = loop.epoch_progress.total
        if loop.epoch_loop.batch_progress.is_last_batch and progress.processed < progress.started:
            self._late.append(path)  # Lightning resumes a checkpoint of now one epoch too late
            return
        if step != self._step:
            values = self._trainer.callback_metrics.items()
            metrics = {name: value for name, value in values if torch.numel(value) == 1}
            self._ckpt.save(step, {ENTRY: checkpoint}, metrics=metrics)
            self._step = step
        if self._trainer.local_rank == 0:
            self._ckpt.write_pointer(path, step)

    def _remove(self, path: Any) -> None:
        if self._trainer.local_rank == 0:
            self.remove_checkpoint(path)

    def _load_sharded(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        loaded, strategy = self.load_checkpoint(path), self._trainer.strategy
        strict = strategy.lightning_module.strict_loading
        options = sharded.StateDictOptions(full_state_dict=True, strict=strict)
        model, states = strategy.model, loaded.pop("optimizer_states")
        sharded.set_model_state_dict(model, loaded.pop("state_dict"), options=options)
        for optimizer, state in zip(strategy.optimizers, states, strict=False):
            sharded.set_optimizer_state_dict(model, optimizer, state, options=options)
        return loaded

    def _opened(self) -> tierfall.Checkpointer:
        if self._ckpt is None:
            self._ckpt = tierfall.open(self._config, run=self._run, fresh=self._fresh)
        return self._ckpt

    def _restore_random(self, report: tierfall.RestoreReport) -> None:
        self._opened().restore({}, step=report.step, attempt=report.attempt, only=["rng"])


def _pointer_at(path: Any) -> tierfall.Pointer:
    if os.path.isfile(path) or os.path.exists(os.path.join(path, "meta.pt")):
        raise ConfigError(
            f"TierfallIO: {path} is of Lightning's own format: tierfall import {path} --as-step N makes it a checkpoint"
        )
    return tierfall.read_pointer(path)


class FromPlugin(Callback):  # type: ignore[misc]
    """Makes the plugin of its Trainer a callback. Lightning gets it by an entry point."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add the plugin to the callbacks, before the next one is set up."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, TierfallIO) and plugin not in trainer.callbacks:
            trainer.callbacks.append(plugin)
