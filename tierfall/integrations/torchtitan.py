"""TorchTitan: ``Trainer.Config(checkpoint=TierfallManager.Config(enable=True, tiers="tiers.yaml"))``.

The manager replaces TorchTitan's own: it saves lazily to the tiers of a run, and resumes from the fastest one. The
state has the names that TorchTitan's own checkpoints have.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

import tierfall
from tierfall.errors import ConfigError, RestoreError, TierfallError
from tierfall.integrations.dcp import TierReader
from tierfall.integrations.dcp.planning import CompleteLoadPlanner
from tierfall.integrations.frameworks import (
    check_interface,
    check_on_all_ranks,
    newest_first,
    read_config,
)

logger = logging.getLogger("tierfall")
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
            at, states = _load_newest(
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
        _check_own_folder(self.folder, super()._find_load_step(), path)
        if path:
            _check_initial_path(path, in_hf=self.initial_load_in_hf)

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


def _load_newest(
    ckpt: tierfall.Checkpointer,
    report: tierfall.RestoreReport,
    state_at: Callable[[int], dict[str, Any]],
    group: ProcessGroup | None,
    *,
    without: Collection[str],
    named: bool,
) -> tuple[dict[str, int], dict[str, Any]]:
    """Load the checkpoint of a report into what ``state_at`` returns for its step, ``without`` some entries.

    One that is damaged in every copy is passed over to the next older one, by all ranks, unless a user ``named`` it.

    Returns step and attempt, and the state. Raises CheckpointException, RestoreError where all are damaged.
    """
    tried = []
    for at in newest_first(ckpt, report):
        state = state_at(at["step"])
        reader = TierReader(ckpt, step=at["step"], attempt=at["attempt"], resume=False)
        try:
            planner = CompleteLoadPlanner(without) if at["step"] else None
            dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
            return at, state
        except CheckpointException as error:
            failures = [failure for failure, _ in error.failures.values()]
            # DCP makes an AssertionError of metadata that could not be read.
            if not any(isinstance(each, (TierfallError, AssertionError)) for each in failures):
                error.add_note(
                    f"TierfallManager: step {at['step']} does not fit the state of this configuration. A loader has a "
                    "state for each rank: with another number of ranks, set exclude_from_loading=['dataloader']. With "
                    "another optimizer, exclude 'optimizer'. With another model, resume with the one that saved"
                )
            if named or not reader.damaged:
                raise
            tried.append(f"step {at['step']}@{at['attempt']}: {failures[0]}")
            logger.error("TierfallManager: skipped: %s", tried[-1])
    raise RestoreError(f"TierfallManager: no checkpoint can be read whole: {'; '.join(tried)}")


def _check_own_folder(folder: str, step: int, initial_load_path: str | None) -> None:
    """Check TorchTitan's own folder, where ``step`` is the newest, or -1. Raises ConfigError where training would begin
    anew beside a checkpoint."""
    if step == -1:
        return
    found = os.path.join(folder, f"step-{step}")
    what = f"TierfallManager: the run has no checkpoint, and {found}"
    if "://" in found or _has_metadata(Path(found)):
        raise ConfigError(
            f"{what} is one of TorchTitan's own format: `tierfall import {found} --as-step {step}` makes it a "
            "checkpoint of the run; or name another folder"
        )
    if not initial_load_path:
        raise ConfigError(
            f"{what} has the weights of an earlier training in Hugging Face's format: to begin with them, set "
            f"initial_load_path={found} and initial_load_in_hf=True; to begin without them, name another folder"
        )


def _check_initial_path(path: str, *, in_hf: bool) -> None:
    """Check that a folder has the format that TorchTitan is asked to load. Raises ConfigError."""
    folder, what = Path(path), f"TierfallManager: initial_load_path={path}"
    if "://" in path:  # TorchTitan reads it by fsspec
        return
    if not folder.is_dir():
        raise ConfigError(f"{what}: there is no such folder")
    _refuse_tierfall(folder, what)
    has_weights = any(folder.glob("*.safetensors"))
    if _has_metadata(folder) if not in_hf else has_weights:
        return
    if in_hf:
        other = "; leave out initial_load_in_hf" if _has_metadata(folder) else ""
        raise ConfigError(
            f"{what} has no *.safetensors, which initial_load_in_hf=True loads{other}"
        )
    advice = f"of DCP: name the folder of one step, as {folder / 'step-100'}"
    if has_weights:
        advice = "of DCP, but *.safetensors of Hugging Face: set initial_load_in_hf=True"
    raise ConfigError(f"{what} has no .metadata {advice}")


def _refuse_tierfall(folder: Path, what: str) -> None:
    """Refuse a pointer, and the folder of a step on a tier: TorchTitan reads neither."""
    if (folder / "commit.json").is_file():
        raise ConfigError(
            f"{what} is a checkpoint of a tier, and TorchTitan reads its own format: `tierfall export STEP --run "
            f"{folder.parent.name} --format dcp --to FOLDER`, and name FOLDER"
        )
    try:
        pointer = tierfall.read_pointer(folder)
    except ConfigError:  # it has none
        return
    raise ConfigError(
        f"{what} points to step {pointer.step} of run {pointer.run!r}, and TorchTitan reads its own format: `tierfall "
        f"export {pointer.step} --run {pointer.run} --format dcp --to FOLDER`, and name FOLDER"
    )


def _has_metadata(folder: Path) -> bool:
    """Return whether a folder has a checkpoint of DCP."""
    return (folder / ".metadata").is_file()
