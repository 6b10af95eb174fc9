"""Lightning: ``Trainer(plugins=[TierfallIO("tiers.yaml")])`` saves to tierfall's tiers, and resumes from them.

Lightning's callbacks decide when to save, and look for paths. At each path that they save to, there is a pointer.

FSDPStrategy and ModelParallelStrategy shard the model. Their weights and states of optimizers are DTensors here: each
rank saves its own blocks, and restores into them, also where another number of ranks saved. No rank holds the whole.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import Callback, Trainer, strategies
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core import saving
from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh

import tierfall
from tierfall import Checkpointer, Config, RestoreReport, item
from tierfall.errors import ConfigError
from tierfall.integrations import frameworks

logger = logging.getLogger("tierfall")

__all__ = ["TierfallIO"]
RESUME = 'fit(..., ckpt_path="last"), or "last.ckpt" if the folder of pointers was lost'
ENTRY = "lightning"
SHARDED = "sharded"
TUNE = "search for a learning rate with a Trainer without TierfallIO"
NEWEST = "last checkpoint of the run"
"""A path at which nothing is, and whose name begins with ``last``."""
POINTER_NAME, OWN_NAME = "tierfall.json", "meta.pt"
"""The files that folders have: of a pointer, and of Lightning's own format."""

PLUGINS: WeakSet[Any] = WeakSet()
"""Each TierfallIO of this process."""


class TierfallIO(CheckpointIO, Callback):  # type: ignore[misc]
    """Saves the checkpoints of a Trainer to the tiers of ``config``, by all ranks, and loads them.

    ``config``, ``run`` and ``fresh`` are those of ``tierfall.open``, which each ``fit`` calls. Raises ConfigError for a
    version of Lightning that is not supported.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config,
        *,
        run: str | None = None,
        fresh: bool = False,
    ) -> None:
        frameworks.check_version("lightning")
        PLUGINS.add(self)
        self._config, self._run, self._fresh = config, run, fresh
        self._ckpt: Checkpointer | None = None
        self._trainer: Any = None
        self._state: WholeState | ShardedState = WholeState()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Have the strategy save by all ranks. Raises ConfigError for a strategy that cannot."""
        self._trainer, strategy = trainer, trainer.strategy
        self._meet: Any = lambda: _meet(self._ckpt, trainer)
        self._state, strategy.checkpoint_io = _state_for(strategy, self._meet), self
        self._restored: RestoreReport | None = None
        self._step: int | None = None  # the last that was saved or loaded
        self._tried: int | None = None  # the last save, also if it was skipped for want of memory
        self._renew = False
        self._late: list[Any] = []  # paths that wait for the end of the epoch
        # Instead of the strategy's own, which call a plugin on rank 0 alone, or not at all.
        strategy.save_checkpoint, strategy.load_checkpoint = self._save, self.load_checkpoint
        strategy.remove_checkpoint = self.remove_checkpoint

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the random state, from which the loader's new iterator has drawn since it was loaded."""
        _warn_of_top_k(trainer, self._opened())
        if self._restored is None:
            frameworks.begin(self._opened(), RESUME)
        else:
            frameworks.restore_random(self._opened(), self._restored)
            self._renew = not trainer.fit_loop.restarted_mid_epoch

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note an evaluation of the fit: what is saved from now on has its metrics."""
        if self._ckpt is not None and not trainer.sanity_checking:
            frameworks.note_evaluation(self._ckpt, trainer.global_step)

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
        if _is_own(path):
            if trains and not _is_of_tuner(path):  # a new run begins with it
                frameworks.begin(self._opened(), RESUME)
            return self._state.load_own(path, *args, **more)
        if not trains:
            return self._state.load(_load(path, self._config, run=self._run))
        ckpt = self._opened()
        found = self._state.restore(ckpt, *_checkpoint_at(path, ckpt))
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
            remove_path(path)

    def teardown(self, *args: Any, **more: Any) -> None:
        """Close the run: at the end of a fit, or once it has failed."""
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:
            ckpt.close()

    def _save(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Save in place of the strategy, on each rank."""
        if _is_of_tuner(path):  # it is no step of the training, and loaded again at once
            return self._state.save_own(self._trainer, checkpoint, path)
        loop = self._trainer.fit_loop
        within = _is_within_batch(loop)
        # Lightning's barrier after this has no bound.
        if (not within or self._trainer.interrupted) and not self._meet():
            return
        if not within:
            _check_whole(checkpoint, path)
            if _is_before_end_of_epoch(loop):
                self._late.append(path)  # Lightning resumes a checkpoint of now one epoch too late
                return
            step = checkpoint["global_step"]
            if step != self._tried:
                metrics = _metrics_of(self._trainer, step)
                handle = self._opened().save(step, self._state.saved(checkpoint), metrics=metrics)
                self._tried = step
                self._step = self._step if handle.outcome == "skipped" else step
        if self._step is not None and self._trainer.local_rank == 0:
            self._opened().write_pointer(path, self._step)

    def _opened(self) -> Checkpointer:
        if self._ckpt is None:
            self._ckpt = tierfall.open(self._config, run=self._run, fresh=self._fresh)
        return self._ckpt


# Loops resume a checkpoint of some moments wrongly -------------------------------------------------


def _is_within_batch(loop: Any) -> bool:
    """Return whether a batch is being trained, which Lightning would leave out of a run that resumes from now."""
    progress = loop.epoch_loop.batch_progress.current
    if progress.processed >= progress.ready:
        return False
    logger.warning("TierfallIO: a save within a batch names the checkpoint before it, if any")
    return True


def _is_before_end_of_epoch(loop: Any) -> bool:
    """Return whether the last batch of an epoch is trained, and the epoch has not ended."""
    progress, batches = loop.epoch_progress.total, loop.epoch_loop.batch_progress
    return bool(batches.is_last_batch and progress.processed < progress.started)


def _meet(ckpt: Checkpointer | None, trainer: Any) -> bool:
    """Wait for all ranks. Return False after an error that came before the run was opened, or after its end."""
    if ckpt is None:
        if trainer.interrupted:  # by OnExceptionCheckpoint
            return False
        raise ConfigError(
            "TierfallIO: a save outside of the training: the run is closed. Save in on_train_end, or by "
            f"ModelCheckpoint; {TUNE}"
        )
    frameworks.meet_all_ranks(ckpt, "save_checkpoint", failed=trainer.interrupted)
    return True


def _metrics_of(trainer: Any, step: int) -> dict[str, Any]:
    """Return the metrics of a checkpoint: what was logged, and ModelCheckpoint's own names for ``monitor``."""
    logged = {
        name: value for name, value in trainer.callback_metrics.items() if torch.numel(value) == 1
    }
    return {"epoch": trainer.current_epoch, "step": step, **logged}


def _warn_of_top_k(trainer: Any, ckpt: Checkpointer) -> None:
    """Log, on rank 0, what ``retain`` lacks to keep what ``save_top_k`` selects. The newest is kept in any case.

    No metric of ``retain`` is missed before the first evaluation.
    """
    if trainer.enable_validation:
        frameworks.note_evaluation(ckpt, math.inf)
    if not trainer.is_global_zero:
        return
    wanted: list[frameworks.Best] = []
    for saves in trainer.checkpoint_callbacks:
        if not isinstance(saves, ModelCheckpoint) or saves.save_top_k == 0:
            continue
        if saves.save_top_k == -1:
            if not frameworks.keeps_all(ckpt):
                logger.warning(
                    "save_top_k=-1 leaves a path for each checkpoint, and no tier keeps all: remove `retain` of a tier"
                )
        elif saves.monitor is not None:
            wanted.append(frameworks.Best.by(saves.monitor, saves.mode, saves.save_top_k))
    several = len({(best.metric, best.mode) for best in wanted if not best.is_newest()}) > 1
    for best in wanted:
        if missing := frameworks.missing_for(ckpt, best):
            logger.warning(
                "save_top_k=%d leaves paths to the best checkpoints by %s, and no tier keeps these: write %s%s",
                best.count,
                best.metric,
                missing,
                ". `retain` has one `best`: each monitor needs a tier of its own" * several,
            )


# What a checkpoint consists of, by strategy --------------------------------------------------------

Loaded = tuple[RestoreReport, Any]


def _state_for(strategy: Any, meet: Callable[[], bool]) -> WholeState | ShardedState:
    """Return how the state of a strategy is saved; ConfigError where it cannot. ``meet`` waits for all ranks, and
    returns False where there is no run to save to."""
    if isinstance(strategy, strategies.DeepSpeedStrategy):
        instead = "use tierfall.integrations.deepspeed, without Lightning"
        raise ConfigError(f"TierfallIO does not support DeepSpeedStrategy: {instead}")
    if isinstance(strategy, strategies.FSDPStrategy):
        _set_mesh(strategy)
    elif not isinstance(strategy, strategies.ModelParallelStrategy):
        return WholeState()
    return ShardedState(strategy, meet)


def _check_whole(checkpoint: dict[str, Any], path: Any) -> None:
    """Raise ConfigError for a checkpoint from which no run can continue."""
    if not checkpoint.get("state_dict") or "optimizer_states" not in checkpoint:
        raise ConfigError(
            f"TierfallIO: {path} has weights alone (save_weights_only): save all, and write weights by tierfall export"
        )


class WholeState:
    """Lightning's dict, of whole tensors, which Lightning loads from host memory."""

    load_own = TorchCheckpointIO().load_checkpoint

    def save_own(self, trainer: Any, checkpoint: dict[str, Any], path: Any) -> None:
        """Save in Lightning's own format."""
        if trainer.is_global_zero:
            TorchCheckpointIO().save_checkpoint(checkpoint, path)

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return the state that is saved, of Lightning's dict."""
        return {ENTRY: checkpoint}

    def restore(self, ckpt: Checkpointer, step: int | None, attempt: int | None) -> Loaded | None:
        """Return a report and the dict of a checkpoint, from which the run continues; None if there is none."""
        found = ckpt.load(step, attempt=attempt)
        return found and (found[0], found[1][ENTRY])

    def load(self, checkpoint: dict[str, Any]) -> Any:
        """Load of Lightning's dict what Lightning does not; return the dict."""
        return checkpoint


class ShardedState:
    """As WholeState, with weights and states of optimizers by rank, restored in place."""

    def __init__(self, strategy: Any, meet: Callable[[], bool]) -> None:
        """Let ``strategy`` return DTensors."""
        self._strategy, self._meet = strategy, meet
        self._has_run = True
        self.load_own = type(strategy).load_checkpoint.__get__(strategy)  # no earlier fit's
        strategy.lightning_module_state_dict = self._weights_on_all_ranks
        strategy.optimizer_state = self._optimizer_state

    def saved(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        names = ("state_dict", "optimizer_states")
        rest = {name: value for name, value in checkpoint.items() if name not in names}
        return {ENTRY: _Rest(rest), SHARDED: {name: checkpoint[name] for name in names}}

    def restore(self, ckpt: Checkpointer, step: int | None, attempt: int | None) -> Loaded | None:
        model, optimizers = self._strategy.model, self._strategy.optimizers
        strict = self._strategy.lightning_module.strict_loading
        weights, states, rest = self._weights(), [*map(self._of_optimizer, optimizers)], _Rest({})
        state = {
            ENTRY: item(rest, on_resize="replicate"),
            SHARDED: {"state_dict": weights, "optimizer_states": states},
        }
        report = ckpt.restore(state, step=step, attempt=attempt, strict=strict)
        if report is None:
            return None
        options = dcp.StateDictOptions(strict=strict)
        dcp.set_model_state_dict(model, weights, options=options)
        for optimizer, found in zip(optimizers, states, strict=True):
            dcp.set_optimizer_state_dict(model, optimizer, found, options=options)
        return report, rest.values

    def save_own(self, *_: Any) -> None:
        raise ConfigError(f"TierfallIO: the strategy shards the model: {TUNE}")

    def load(self, checkpoint: dict[str, Any]) -> Any:
        model, strict = self._strategy.model, self._strategy.lightning_module.strict_loading
        options = dcp.StateDictOptions(full_state_dict=True, strict=strict)
        dcp.set_model_state_dict(model, checkpoint["state_dict"], options=options)
        return checkpoint

    def _weights_on_all_ranks(self) -> dict[str, Any]:
        self._has_run = self._meet()
        return self._weights() if self._has_run else {}

    def _optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        # Called after the weights. It is collective, and a rank that has failed before the run comes alone.
        return self._of_optimizer(optimizer) if self._has_run else {}

    def _weights(self) -> dict[str, Any]:
        return dcp.get_model_state_dict(self._strategy.model)

    def _of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        own = getattr(optimizer, "optimizer", optimizer)  # without Lightning's wrapper
        return dcp.get_optimizer_state_dict(self._strategy.model, own)


class _Rest:
    """A dict with any keys. It is restored as a whole, as one object of the state."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.values = values


def _set_mesh(strategy: Any) -> None:
    """Let FSDP shard by a mesh, before it wraps the model: its state consists of DTensors then."""
    if "process_group" in strategy.kwargs:
        raise ConfigError("TierfallIO: FSDPStrategy: pass device_mesh in place of process_group")
    if "device_mesh" not in strategy.kwargs:
        mesh = init_device_mesh(strategy.root_device.type, (strategy.world_size,))
        strategy.kwargs["device_mesh"] = mesh


# What is at a path where Lightning expects a checkpoint --------------------------------------------


def _is_own(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint of Lightning's own format."""
    return os.path.isfile(path) or os.path.exists(os.path.join(path, OWN_NAME))


def _is_of_tuner(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is the temporary one of a search for a learning rate or a batch size."""
    return os.path.basename(path).startswith((".lr_find_", ".scale_batch_size_"))


def _is_pointer(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder with a pointer."""
    return os.path.isfile(os.path.join(path, POINTER_NAME))


def _is_last(path: str | os.PathLike[str]) -> bool:
    """Return whether a path means the newest checkpoint of the run, if it has one."""
    return os.path.basename(path).startswith("last")


def _checkpoint_at(
    path: str | os.PathLike[str], ckpt: Checkpointer
) -> tuple[int | None, int | None]:
    """Return step and attempt of the checkpoint that a path leads to.

    They are None for a name that begins with ``last``: the newest of the run, if it has one. Raises ConfigError for a
    pointer to a checkpoint of another run.
    """
    if _is_last(path):
        return None, None
    pointer, run = tierfall.read_pointer(path), frameworks.run_of(ckpt)
    if pointer.run != run:
        raise ConfigError(
            f"TierfallIO: {path} is of run {pointer.run!r}, not of {run!r}: name a dirpath for each run; to begin with "
            "these weights, pass tierfall.load(path)['lightning']['state_dict'] to the module's load_state_dict"
        )
    return pointer.step, pointer.attempt


def remove_path(path: str | os.PathLike[str]) -> None:
    """Remove a pointer, a link, or a checkpoint of Lightning's own format. A path where nothing is has no effect.

    An earlier start may have removed it before it was killed. Raises ConfigError for another folder.
    """
    # The first rank of each node removes it, and all nodes may see the same folder.
    with suppress(FileNotFoundError):
        if os.path.islink(path) or os.path.isfile(path):
            os.unlink(path)
            return
        names = os.listdir(path)
        if names and not {POINTER_NAME, OWN_NAME}.intersection(names):
            raise ConfigError(
                f"TierfallIO: {path} is to be removed, and is no checkpoint: it has no {POINTER_NAME}, and no "
                f"{OWN_NAME} of Lightning's; name another dirpath"
            )
        shutil.rmtree(path)


class FromPlugin(Callback):  # type: ignore[misc]
    """Makes the plugin of its Trainer a callback, where it is one too. Lightning gets it by an entry point."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Add the plugin to the callbacks, before the next one is set up."""
        plugin = trainer.strategy.checkpoint_io
        if isinstance(plugin, Callback) and plugin not in trainer.callbacks:
            trainer.callbacks.append(plugin)


# Calls of Lightning that look for files, and ask a plugin about neither ----------------------------


def _accept_pointers(plugin: type) -> None:
    """Let ``validate``, ``test`` and ``predict`` of a Trainer with a ``plugin`` evaluate the newest checkpoint for
    ``ckpt_path="last"``, and ``load_from_checkpoint`` of modules load what a pointer leads to."""
    for name in ("validate", "test", "predict"):
        setattr(Trainer, name, _with_newest(getattr(Trainer, name), plugin))
    if (load := getattr(saving, "pl_load", None)) is not None:
        saving.pl_load = _with_pointers(load)


def _load(path: Any, config: Any = None, run: str | None = None, **options: Any) -> dict[str, Any]:
    """Load Lightning's dict of a checkpoint that is evaluated: what the pointer at ``path`` names. If the name of the
    path begins with ``last``, the newest of the pointer's run, or of the configuration's without a pointer."""
    if _is_last(path) and _is_pointer(path):
        path = tierfall.read_pointer(path).config()
    elif _is_last(path) and config is not None:
        path = frameworks.config_of(config, run)
    loaded = tierfall.load(path, **options)
    return {**loaded[ENTRY], **loaded.get(SHARDED, {})}


def _with_newest(call: Callable[..., Any], plugin: type) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def evaluate(trainer: Any, *args: Any, **more: Any) -> Any:
        given = signature.bind(trainer, *args, **more)
        named = given.arguments.get("ckpt_path")
        if named == "last" and isinstance(trainer.strategy.checkpoint_io, plugin):
            given.arguments["ckpt_path"] = NEWEST
        return call(*given.args, **given.kwargs)

    return evaluate


def _with_pointers(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def load_path(path: Any, map_location: Any = None, **more: Any) -> Any:
        if not isinstance(path, str | os.PathLike) or not _is_pointer(path):
            return call(path, map_location, **more)
        known = isinstance(map_location, str | torch.device)  # else a function of Lightning's
        return _load(path, map_location=map_location if known else "cpu")

    return load_path


_accept_pointers(TierfallIO)
