"""What one node keeps of peer memory, as a process sees it that does not meet the other nodes."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from tierfall.backends.peer.view import PeerView
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import PeerTierConfig
from tierfall.core.types.errors import BackendError
from tierfall.tiers.stored import StoredTier


def kept_folders(path: Path) -> list[Path]:
    """Return the folders of what this node keeps: ``0`` with what it has written itself of earlier attempts, and one
    for each number of a copy, of earlier starts, too, which may have had more."""
    names = [child.name for child in path.iterdir() if child.is_dir()] if path.is_dir() else []
    return [
        path / str(number) for number in sorted(int(name) for name in names if name.isdecimal())
    ]


def view_kept(tier: PeerTierConfig, *, tends: bool = False) -> PeerView:
    """Open what this node keeps, for a process that does not meet the other nodes: for reading, or if it ``tends`` it,
    to write documents of no checkpoint, too."""
    folders = kept_folders(tier.path) or [tier.path]
    kept = [PosixBackend(folder, read_only=not tends) for folder in folders]
    return PeerView(kept, (), place=str(tier.path), tends=tends)


def keeps_any(tier: PeerTierConfig, run: str) -> bool:
    """Return whether this node keeps a checkpoint of ``run``, or cannot tell: then the tier is opened, which says
    why."""
    if not tier.path.exists():
        return False
    try:
        backend = view_kept(tier)
        with closing(
            StoredTier(name=tier.name, run=run, backend=backend, has_latest=False)
        ) as kept:
            return bool(kept.list().copies)
    except BackendError:
        return True


def kept_of_run(path: Path, run: str) -> list[Path]:
    """Return the folders of what this node keeps of a run; ``path`` is that of the peer tier."""
    return [folder for folder in path.glob(f"*/{run}") if folder.is_dir()]


def discard_kept(path: Path, run: str) -> None:
    """Delete what this node keeps of a run for other nodes. Raises BackendError where a file cannot be deleted."""
    for folder in kept_of_run(path, run):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise BackendError(f"{error.filename} cannot be deleted: {error.strerror}") from error
