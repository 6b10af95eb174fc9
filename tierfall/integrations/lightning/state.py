"""What a checkpoint of Lightning's Trainer consists of, by strategy: a dict of whole tensors, or blocks of each rank.

FSDPStrategy and ModelParallelStrategy shard the model. Their weights and states of optimizers are DTensors here: each
rank saves its own blocks, and restores into them, also where another number of ranks saved. No rank holds the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import strategies
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh

from tierfall import Checkpointer, RestoreReport, item
from tierfall.errors import ConfigError

ENTRY = "lightning"
SHARDED = "sharded"
TUNE = "search for a learning rate with a Trainer without TierfallIO"
Loaded = tuple[RestoreReport, Any]


def state_for(strategy: Any, meet: Callable[[], bool]) -> WholeState | ShardedState:
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


def check_whole(checkpoint: dict[str, Any], path: Any) -> None:
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
