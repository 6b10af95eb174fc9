"""States that consist of files: what torch.distributed.checkpoint (DCP) writes by path, each file a tensor of bytes.

They are below one reserved entry of the state. Only DCP can read such a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.merge import MergedHeader
from tierfall.core.image.tree import MapNode, TensorNode
from tierfall.core.types.errors import CaptureError, RestoreError

ENTRY = "dcp_files"


def check_no_files(state: object) -> None:
    """Raise CaptureError if a user's state has the reserved entry."""
    if isinstance(state, Mapping) and ENTRY in state:
        raise CaptureError(
            f'save: state["{ENTRY}"] has a name that is reserved for what torch.distributed.checkpoint writes by path; '
            "choose another name"
        )


def are_files(header: ImageHeader) -> bool:
    """Whether an image contains files, and therefore no state that ``restore`` could fill."""
    return any(key == ENTRY for key, _ in header.tree.entries)


def refuse_files(header: ImageHeader, *, doing: str, instead: Callable[[], str] = str) -> None:
    """Raise RestoreError if an image contains files; ``instead`` returns the end of the message."""
    if are_files(header):
        raise RestoreError(
            f"{doing}: {header.what}: torch.distributed.checkpoint has saved this step by path; read it with "
            "torch.distributed.checkpoint.load(state, checkpoint_id='tiers://RUN/step-STEP')"
            + instead()
        )


def file_positions(merged: MergedHeader) -> dict[str, int]:
    """The position of each file's bytes, by file name."""
    found = next((node for key, node in merged.header.tree.entries if key == ENTRY), None)
    if not isinstance(found, MapNode):
        return {}
    return {
        key: node.position
        for key, node in found.entries
        if isinstance(key, str) and isinstance(node, TensorNode)
    }
