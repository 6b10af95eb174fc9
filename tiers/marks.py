"""Marks beside the checkpoints of a tier: those of persons (pin, tag, tombstone), and damage marks of readers.

A damage mark belongs to one copy: it is stored in the step folder, under a name with a digest of the id of the attempt
that saved the copy. A deletion or a repair of the copy deletes it. It is never copied to another tier, and no copy is
deleted because of it alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from tierfall.core.format.commit_files import damage_mark
from tierfall.core.format.documents import read_twice
from tierfall.core.format.records import Commit, Mark, parse_mark
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.errors import KeyExistsError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.documents import Documents

_PREFIX = f"{keys.MARKS_FOLDER}/"
REQUESTS_AT_ONCE_MIN = 32
REQUESTS_FOR_EACH = 4
"""Concurrent small requests: this many for each large one that the backend's ``max_parallel`` allows, and at least
REQUESTS_AT_ONCE_MIN."""


def marks_among(files: Iterable[str]) -> frozenset[str]:
    """Return the names of the persons' marks among the files of a step folder."""
    names = (file.removeprefix(_PREFIX) for file in files if file.startswith(_PREFIX))
    return frozenset(name for name in names if not keys.is_damage_mark(name))


class TierMarks:
    """The marks of one run on one tier. May be used by several threads."""

    def __init__(self, documents: Documents) -> None:
        self.name = documents.tier
        self.backend = documents.backend
        self._run = documents.run
        self._documents = documents
        at_once = REQUESTS_FOR_EACH * self.backend.traits.max_parallel
        self._parallel = max(REQUESTS_AT_ONCE_MIN, at_once)
        self._marks_version: bytes | None = None
        """The version of the run's marks that the last listing has read."""

    def _begin_marks(self) -> None:
        """Before the first listing: note the version of the marks that it will read."""
        if self._marks_version is None:
            self._marks_version = self._read_version()

    def add_mark(self, mark: Mark) -> None:
        """Write a person's mark beside a checkpoint; other processes that have the run open will read it."""
        self._create_mark(mark)
        self._change_version()

    def _create_mark(self, mark: Mark) -> None:
        """Write a mark beside a checkpoint that is about to be committed."""
        key = self._mark_key(mark.checkpoint, mark.name)
        try:
            self._documents.create(key, mark.encode())
        except KeyExistsError:
            # the same mark exists, which is the state that was asked for
            self._documents.sync(key)

    def remove_mark(self, checkpoint: CheckpointId, name: str) -> None:
        """Delete a mark; other processes that have the run open will notice."""
        self.backend.delete(self._mark_key(checkpoint, name))
        self._change_version()

    def read_mark(self, checkpoint: CheckpointId, name: str) -> Mark:
        key = self._mark_key(checkpoint, name)
        what = self._documents.what(key)
        return read_twice(lambda: parse_mark(self._documents.read(key), what=what))

    def marks(self, checkpoint: CheckpointId) -> frozenset[str]:
        """Read the names of the persons' marks beside a checkpoint."""
        return marks_among(f"{_PREFIX}{name}" for name in self._mark_names(checkpoint))

    def read_marks(self, checkpoints: Iterable[CheckpointId]) -> dict[CheckpointId, frozenset[str]]:
        """Read the names of the persons' marks beside these checkpoints; beside all, if any mark of the run changed
        since the last call."""
        version = self._read_version()
        if version == self._marks_version:
            asked = list(checkpoints)
            found = run_in_parallel(self.marks, asked, parallel=self._parallel)
            return dict(zip(asked, found, strict=True))
        files: dict[CheckpointId, set[str]] = {checkpoint: set() for checkpoint in checkpoints}
        for stored in self.backend.scan(f"{self._run}/"):
            folder, _, name = stored.key.removeprefix(f"{self._run}/").partition("/")
            if checkpoint := keys.parse_step_folder(folder):
                files.setdefault(checkpoint, set()).add(name)
        self._marks_version = version
        return {checkpoint: marks_among(names) for checkpoint, names in files.items()}

    # Damage --------------------------------------------------------------------------------------

    def _damage_of(self, commit: Commit, files: Iterable[str]) -> str | None:
        """Return why a reader has marked this copy as damaged; None where no such mark is among ``files``, the names
        in its folder."""
        marked = {name for f in files if keys.is_damage_mark(name := f.removeprefix(_PREFIX))}
        if not marked or (name := damage_mark(commit.lineage)) not in marked:
            return None
        checkpoint = commit.lineage.checkpoint
        try:
            reason = self.read_mark(checkpoint, name).reason
        except TierfallError:  # the mark counts, even if it cannot be read
            reason = f"its mark {_PREFIX}{name} cannot be read"
        return f"{checkpoint} was found damaged: {reason}"

    def clear_damage(self, checkpoint: CheckpointId) -> None:
        """Delete the damage marks of a copy that was rewritten, or read whole and verified."""
        for name in filter(keys.is_damage_mark, self._mark_names(checkpoint)):
            self.backend.delete(self._mark_key(checkpoint, name))

    # Keys ----------------------------------------------------------------------------------------

    def _change_version(self) -> None:
        """Write a new version after a change of marks: a process that reads it reads the change too. This process does
        not note it as read, because another one may have changed a mark just before."""
        text = f"{secrets.token_hex(16)}\n".encode()
        self._documents.replace(f"{self._run}/{keys.MARKS_CHANGED_NAME}", text)

    def _read_version(self) -> bytes:
        try:
            return self._documents.read(f"{self._run}/{keys.MARKS_CHANGED_NAME}")
        except KeyNotFoundError:
            return b""

    def _mark_names(self, checkpoint: CheckpointId) -> list[str]:
        prefix = self._mark_key(checkpoint, "")
        return [stored.key.removeprefix(prefix) for stored in self.backend.scan(prefix)]

    def _mark_key(self, checkpoint: CheckpointId, name: str) -> str:
        return f"{keys.step_prefix(self._run, checkpoint)}{_PREFIX}{name}"
