"""A state that is files: what torch.distributed.checkpoint writes by path, each file's bytes a tensor by its name.

It stands below one entry of the state, which no other state may have: what is saved so is for DCP alone to read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.merge import MergedHeader
from tierfall.core.image.tree import MapNode, TensorNode
from tierfall.core.types.errors import CaptureError, RestoreError

ENTRY = "dcp_files"


def check_no_files(state: object) -> None:
    """Raise CaptureError where a user's state has the entry that says what is below it are files."""
    if isinstance(state, Mapping) and ENTRY in state:
        raise CaptureError(
            f'save: state["{ENTRY}"] has a name that is kept for what torch.distributed.checkpoint writes by path; '
            "name it otherwise"
        )


def are_files(header: ImageHeader) -> bool:
    """Say whether an image holds files, and so no state that could be restored."""
    return any(key == ENTRY for key, _ in header.tree.entries)


def refuse_files(header: ImageHeader, *, doing: str, instead: Callable[[], str] = str) -> None:
    """Raise RestoreError where an image holds files; ``instead`` makes what the message ends with."""
    if are_files(header):
        raise RestoreError(
            f"{doing}: {header.what}: torch.distributed.checkpoint has saved this step by path, as files that it alone "
            "reads: torch.distributed.checkpoint.load(state, checkpoint_id='tiers://RUN/step-STEP') does"
            + instead()
        )


def file_slots(merged: MergedHeader) -> dict[str, int]:
    """Name the files, and the slot of each one's bytes."""
    found = next((node for key, node in merged.header.tree.entries if key == ENTRY), None)
    if not isinstance(found, MapNode):
        return {}
    return {
        key: node.slot
        for key, node in found.entries
        if isinstance(key, str) and isinstance(node, TensorNode)
    }
