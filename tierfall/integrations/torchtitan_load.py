"""How the adapter of TorchTitan loads: the newest checkpoint that is not damaged; and checks of the folders that
TorchTitan's own loader reads where the run has no checkpoint, as one rank sees them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.api import CheckpointException

import tierfall
from tierfall.errors import ConfigError, RestoreError, TierfallError
from tierfall.integrations.dcp import TierReader
from tierfall.integrations.dcp.planning import CompleteLoadPlanner
from tierfall.integrations.frameworks import newest_first

__all__ = ["check_initial_path", "check_own_folder", "load_newest"]

logger = logging.getLogger("tierfall")


def load_newest(
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


def check_own_folder(folder: str, step: int, initial_load_path: str | None) -> None:
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


def check_initial_path(path: str, *, in_hf: bool) -> None:
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
