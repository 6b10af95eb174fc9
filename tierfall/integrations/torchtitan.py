"""TorchTitan: ``Trainer.Config(checkpoint=TierfallManager.Config(enable=True, tiers="tiers.yaml"))``.

The manager replaces TorchTitan's own: it saves lazily to the tiers of a run, and resumes from the fastest one. The
state has the names that TorchTitan's own checkpoints have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful

import tierfall
from tierfall.errors import ConfigError
from tierfall.integrations import torchtitan_load
from tierfall.integrations.frameworks import check_interface, check_on_all_ranks, read_config

SUPPORTED = "0.3"
NEEDED = ("load", "_find_load_step", "_should_save", "_save_last_step")
INSTEAD = {
    "create_seed_checkpoint": "let TorchTitan's CheckpointManager write it, and name its folder as initial_load_path",
    "purge_exempt": "set `retain` of the tiers instead, such as {last: 2, every: 1000}",
}
"""Fields of TorchTitan's manager that are refused, and what to do."""

check_interface("torchtitan.components.checkpointer", "CheckpointManager", NEEDED, SUPPORTED)
from torchtitan.components.checkpointer import (  # noqa: E402
    DATALOADER,
    MODEL,
    TRAIN_STATE,
    CheckpointManager,
)

__all__ = ["TierfallManager"]


class TierfallManager(CheckpointManager):  # type: ignore[misc]
    """A checkpoint manager of TorchTitan that saves to tierfall's tiers, and loads from them.

    All ranks save and load. Raises ConfigError for a field that is not supported, RestoreError where the step to
    load is not there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The fields of TorchTitan's manager, and where tierfall's configuration is."""

        tiers: str = "tiers.yaml"
        """Path of tierfall's configuration."""

        run: str | None = None
        """Name of the run; absent: that of the configuration."""

    def __init__(self, config: Any, *, base_folder: str = "", **parts: Any) -> None:
        self._ckpt: tierfall.Checkpointer | None = None
        # "async" makes a gloo group, which the ranks meet by; 0 has TorchTitan delete nothing in its folder.
        own = replace(config, async_mode="async", keep_latest_k=0)
        super().__init__(own, base_folder=base_folder, **parts)
        if not getattr(config, "enable", True):
            return
        for name, instead in INSTEAD.items():
            if getattr(config, name, None):
                raise ConfigError(f"TierfallManager: {name}: {instead}")
        settings = read_config(config.tiers, config.run, keep_last=config.keep_latest_k)
        self._ckpt = tierfall.open(settings, process_group=self.pg)

    # Called by TorchTitan, on all ranks ------------------------------------------------------------------

    def load(self, step: int = -1) -> bool:
        """Load ``step``, or the newest checkpoint of the run if it is -1; an initial checkpoint where the run is empty.
        Return whether there was one.

        A newest checkpoint that is damaged in every copy is passed over to the next older one, by all ranks.
        """
        if self._ckpt is None:
            return False
        # Of an empty state, this restores the random state alone, if there is one of as many ranks.
        report = self._ckpt.restore({}, step=None if step == -1 else step, strict=False)
        if report is None:
            return self._load_initial()
        with torch.no_grad():
            state, without = self._state_to_load, self.exclude_from_loading
            at, states = torchtitan_load.load_newest(
                self._ckpt, report, state, self.pg, without=without, named=step != -1
            )
            self.states[MODEL].load_state_dict(states)
        if self.states[DATALOADER] is not None:
            self.states[DATALOADER].state_dict()  # makes the iterator, which draws random numbers
        self._ckpt.restore({}, step=at["step"], attempt=at["attempt"], strict=False)
        return True

    def _load_initial(self) -> bool:
        assert self._ckpt is not None
        check_on_all_ranks(self._ckpt, "load an initial checkpoint", self._check_initial)
        self._ckpt.begin()
        return bool(super().load())

    def _check_initial(self) -> None:
        path = self.initial_load_path
        torchtitan_load.check_own_folder(self.folder, super()._find_load_step(), path)
        if path:
            torchtitan_load.check_initial_path(path, in_hf=self.initial_load_in_hf)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._ckpt is None or not self._should_save(curr_step, last_step):
            return False
        with torch.no_grad():
            found = self._state().items()
            state = {k: x.state_dict() if isinstance(x, Stateful) else x for k, x in found}
            self._ckpt.save(curr_step, state)
            if last_step and self.last_save_in_hf:
                self._save_last_step(curr_step)
        return True

    def _close(self) -> None:
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:  # TorchTitan closes twice
            ckpt.close()
        super()._close()

    # Below -----------------------------------------------------------------------------------------------

    def _find_load_step(self, *args: Any, **more: Any) -> int:
        """Return -1: the run has no checkpoint, and what is in TorchTitan's folder is not resumed from."""
        return -1

    def _state_to_load(self, step: int) -> dict[str, Any]:
        if step and TRAIN_STATE in self.exclude_from_loading:
            raise ConfigError(
                f"exclude_from_loading: {TRAIN_STATE}: this would train from step 1, and the run is at step {step}: "
                f"`tierfall export {step} --format dcp --to FOLDER`, and name FOLDER as initial_load_path of a new run"
            )
        return self._state(self.exclude_from_loading, model_only=step == 0)

    def _state(self, without: Any = (), *, model_only: bool = False) -> dict[str, Any]:
        """Return the state as TorchTitan's own checkpoints have it: the model's tensors beside the other entries."""
        if unknown := set(without) - set(self.states):
            raise ConfigError(
                f"exclude_from_loading: {', '.join(sorted(unknown))}: expected {', '.join(self.states)}"
            )
        others = {} if model_only else self.states
        state = {name: x for name, x in others.items() if name != MODEL and name not in without}
        return {**state, **self.states[MODEL].state_dict()}
