"""Lightning: ``Trainer(plugins=[TierfallIO("tiers.yaml")])`` saves to tierfall's tiers, and resumes from them.

Lightning's callbacks decide when to save, and look for paths. At each path that they save to, there is a pointer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.plugins import CheckpointIO

import tierfall
from tierfall.errors import ConfigError
from tierfall.integrations import frameworks, keeping
from tierfall.integrations.lightning import calls, files, progress, state, top_k

__all__ = ["TierfallIO"]
RESUME = 'fit(..., ckpt_path="last"), or "last.ckpt" if the folder of pointers was lost'


class TierfallIO(CheckpointIO, Callback):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer to the tiers of ``config``, by all ranks, and loads them.

    ``config``, ``run`` and ``fresh`` are those of ``tierfall.open``, which each ``fit`` calls. Raises ConfigError for a
    version of Lightning that is not supported.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | tierfall.Config,
        *,
        run: str | None = None,
        fresh: bool = False,
    ) -> None:
        frameworks.check_version("lightning")
        files.PLUGINS.add(self)
        self._config, self._run, self._fresh = config, run, fresh
        self._ckpt: tierfall.Checkpointer | None = None
        self._trainer: Any = None
        self._state: state.WholeState | state.ShardedState = state.WholeState()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the strategy save by all ranks. Raises ConfigError for a strategy that cannot."""
        self._trainer, strategy = trainer, trainer.strategy
        self._meet: Any = lambda: progress.meet(self._ckpt, trainer)
        self._state, strategy.checkpoint_io = state.state_for(strategy, self._meet), self
        self._restored: tierfall.RestoreReport | None = None
        self._step: int | None = None  # the last that was saved or loaded
        self._tried: int | None = None  # the last save, also if it was skipped for want of memory
        self._renew = False
        self._late: list[Any] = []  # paths that wait for the end of the epoch
        # Instead of the strategy's own, which call a plugin on rank 0 alone, or not at all.
        strategy.save_checkpoint, strategy.load_checkpoint = self._save, self.load_checkpoint
        strategy.remove_checkpoint = self.remove_checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the random state, from which the loader's new iterator has drawn since it was loaded."""
        top_k.check(trainer, self._opened())
        if self._restored is None:
            frameworks.begin(self._opened(), RESUME)
        else:
            frameworks.restore_random(self._opened(), self._restored)
            self._renew = not trainer.fit_loop.restarted_mid_epoch

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note an evaluation of the fit: what is saved from now on has its metrics."""
        if self._ckpt is not None and not trainer.sanity_checking:
            keeping.note_evaluation(self._ckpt, trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the iterator of the first epoch again, as it was: after its sampler's epoch was set."""
        if self._renew and self._restored is not None:
            frameworks.restore_random(self._opened(), self._restored)
            iter(trainer.fit_loop._data_fetcher)
        self._renew = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was to be saved at the last batch."""
        while self._late:
            trainer.save_checkpoint(self._late.pop(0))

    def load_checkpoint(self, path: Any, *args: Any, **more: Any) -> Any:
        """Load what the pointer at ``path`` leads to; if its name begins with ``last``, the newest checkpoint."""
        trains = self._trainer is not None and self._trainer.state.fn == "fit"
        if files.is_own(path):
            if trains and not files.is_of_tuner(path):  # a new run begins with it
                frameworks.begin(self._opened(), RESUME)
            return self._state.load_own(path, *args, **more)
        if not trains:
            return self._state.load(calls.load(path, self._config, run=self._run))
        ckpt = self._opened()
        found = self._state.restore(ckpt, *files.checkpoint_at(path, ckpt))
        if found is None:
            raise ConfigError(f"TierfallIO: {path}: no tier has a checkpoint of this run")
        self._restored, loaded = found
        self._step = self._tried = self._restored.step
        return loaded

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        """Refuse: Lightning calls a plugin that is no callback on rank 0 alone."""
        raise ConfigError(
            "TierfallIO has to be a callback, so that all ranks save, and tierfall's entry points are not installed: "
            "pass io = TierfallIO(...) as Trainer(plugins=[io], callbacks=[io])"
        )

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a pointer. Its checkpoint stays as long as ``retain`` keeps it."""
        if self._trainer.local_rank == 0:
            files.remove(path)

    def teardown(self, *args: Any, **more: Any) -> None:
        """Close the run: at the end of a fit, or once it has failed."""
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:
            ckpt.close()

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save in place of the strategy, on each rank."""
        if files.is_of_tuner(path):  # it is no step of the training, and loaded again at once
            return self._state.save_own(self._trainer, checkpoint, path)
        loop = self._trainer.fit_loop
        within = progress.is_within_batch(loop)
        # Lightning's barrier after this has no bound.
        if (not within or self._trainer.interrupted) and not self._meet():
            return
        if not within:
            state.check_whole(checkpoint, path)
            if progress.is_before_end_of_epoch(loop):
                self._late.append(path)  # Lightning resumes a checkpoint of now one epoch too late
                return
            step = checkpoint["global_step"]
            if step != self._tried:
                metrics = progress.metrics(self._trainer, step)
                handle = self._opened().save(step, self._state.saved(checkpoint), metrics=metrics)
                self._tried = step
                self._step = self._step if handle.outcome == "skipped" else step
        if self._step is not None and self._trainer.local_rank == 0:
            self._opened().write_pointer(path, self._step)

    def _opened(self) -> tierfall.Checkpointer:
        if self._ckpt is None:
            self._ckpt = tierfall.open(self._config, run=self._run, fresh=self._fresh)
        return self._ckpt


calls.accept_pointers(TierfallIO)
