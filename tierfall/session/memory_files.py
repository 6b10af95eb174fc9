"""The files of this process's host memory, which others may remove during training: the arena of each of its slots, and
the lock file.

systemd removes them at the end of a user's last session (RemoveIPC), and so do cleaners of temporary files. The memory
itself remains, and flushes continue; but its images are lost with this process. The next save has new files for its
image and those after it; that is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.types.errors import LockError, TierfallError
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.tiers.arena.folder import prepare_folder

logger = logging.getLogger("tierfall")

WHO = "by systemd's RemoveIPC, say, or by a cleaner of temporary files"


class MemoryFiles:
    """See the module. ``problem`` is why images in memory are lost with this process; '': none is, as far as known."""

    def __init__(self, tiers: OpenedTiers) -> None:
        self._tiers = tiers
        self.problem = ""

    def renew(self) -> None:
        """Have files where some are missing: a save calls this. What prevents that is logged, and the memory is used on
        without them."""
        try:
            self.hold_place()
            self._tiers.host.replace_file()
        except TierfallError as error:
            taken = isinstance(error, LockError)
            why = "another process took this run's place in memory: " if taken else ""
            self._note(f"no new file can be allocated at present: {why}{error}")

    def hold_place(self) -> None:
        """Hold this run's place in memory again if its lock file was removed. Raises LockError if another process has
        it."""
        is_gone = self._note_lost()
        locks = [lock for lock, _ in self._tiers.slots() if not lock.is_file_intact()]
        if locks or is_gone:
            prepare_folder(self._tiers.folder)
            self._tiers.identities.rewrite_memory()
        for lock in locks:
            lock.reacquire()
            # with its arena gone too, that is what is logged
            level = logging.DEBUG if is_gone else logging.WARNING
            logger.log(level, "the lock file %s was removed, %s: it is made anew", lock.path, WHO)

    def _note_lost(self) -> bool:
        """Note the memory whose file was removed; return whether the next image has none."""
        lost = [host for host in self._tiers.hosts() if host.regions_without_file()]
        is_gone = not self._tiers.host.file_exists()
        for host in [self._tiers.host] if is_gone else lost:
            self._note(f"its file {host.path} was removed while this process uses it, {WHO}")
        if not (lost or is_gone):
            self.problem = ""
        return is_gone

    def _note(self, why: str) -> None:
        if why not in self.problem:
            first = f"{self._tiers.host.name}: what is in memory ends with this process: "
            self.problem = f"{self.problem}; {why}" if self.problem else first + why
            logger.warning("%s", self.problem)

    def ends_with_process(self, regions: Iterable[HostRegion | None]) -> bool:
        """Whether one of these images in memory is lost with this process, by all that is known."""
        try:
            lost = [each for host in self._tiers.hosts() for each in host.regions_without_file()]
            if lost:
                self._note_lost()
            return any(region is each for region in regions for each in lost)
        except TierfallError:
            return True

    def are_intact(self) -> bool:
        """Return whether no other process can own files of these names; False where that is not known."""
        try:
            return all(lock.is_file_intact() for lock, _ in self._tiers.slots())
        except TierfallError as error:
            logger.warning("close: what is in memory stays: %s", error)
            return False
