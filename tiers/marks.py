"""The marks beside the checkpoints of a tier: what persons have left there, and what readers have found damaged.

A damage mark is bound to the copy that it speaks of: it lies in its folder, and its name has a digest of the id of the
attempt that saved it. It goes with the copy, and with a repair. It is no mark of a person: it is never copied to
another tier, and nothing is deleted because of it alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from tierfall.core.format.commit_files import damage_mark
from tierfall.core.format.records import Commit, Mark, read_mark
from tierfall.core.runtime.bounded_calls import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import KeyExistsError, KeyNotFoundError, TierfallError
from tierfall.core.types.values import CheckpointId
from tierfall.tiers.documents import Documents

_PREFIX = f"{keys.MARKS_FOLDER}/"


def marks_among(files: Iterable[str]) -> frozenset[str]:
    """Return the names of the persons' marks among the files of a step's folder."""
    names = (file.removeprefix(_PREFIX) for file in files if file.startswith(_PREFIX))
    return frozenset(name for name in names if not keys.is_damage_mark(name))


class Marks:
    """The marks of one run on one tier. May be used by several threads."""

    def __init__(self, run: str, backend: Backend, documents: Documents, *, parallel: int) -> None:
        """``parallel``: so many requests are made at a time."""
        self._run = run
        self._backend = backend
        self._documents = documents
        self._parallel = parallel
        self._seen: bytes | None = None

    def begin(self) -> None:
        """Note, once, which changes are read by the listing that follows."""
        if self._seen is None:
            self._seen = self._changed()

    def add(self, mark: Mark) -> None:
        """Leave a mark; whoever else has the run open is to read it."""
        self.create(mark)
        self._report_change()

    def create(self, mark: Mark) -> None:
        """Leave a mark beside what is just being committed."""
        key = self._key(mark.checkpoint, mark.name)
        try:
            self._documents.create(key, mark.encode())
        except KeyExistsError:
            # somebody left the same mark already, which is what was asked for
            self._documents.settle(key)

    def remove(self, checkpoint: CheckpointId, name: str) -> None:
        self._backend.delete(self._key(checkpoint, name))
        self._report_change()

    def read(self, checkpoint: CheckpointId, name: str) -> Mark:
        key = self._key(checkpoint, name)
        return read_mark(self._documents.read(key), what=self._documents.what(key))

    def of(self, checkpoint: CheckpointId) -> frozenset[str]:
        """Return the names of the persons' marks beside a checkpoint, read afresh."""
        return marks_among(f"{_PREFIX}{name}" for name in self._names(checkpoint))

    def of_many(self, checkpoints: Iterable[CheckpointId]) -> dict[CheckpointId, frozenset[str]]:
        """Do so for several; for all that lie here, where any was left or taken away since they were last read."""
        changed = self._changed()
        if changed == self._seen:
            asked = list(checkpoints)
            found = run_in_parallel(self.of, asked, parallel=self._parallel)
            return dict(zip(asked, found, strict=True))
        files: dict[CheckpointId, set[str]] = {checkpoint: set() for checkpoint in checkpoints}
        for stored in self._backend.scan(f"{self._run}/"):
            folder, _, name = stored.key.removeprefix(f"{self._run}/").partition("/")
            if checkpoint := keys.parse_step_folder(folder):
                files.setdefault(checkpoint, set()).add(name)
        self._seen = changed
        return {checkpoint: marks_among(names) for checkpoint, names in files.items()}

    # Damage --------------------------------------------------------------------------------------

    def damage_of(self, commit: Commit, files: Iterable[str]) -> str | None:
        """Return what a reader has found wrong with the copy of this commit record; None where nothing is marked among
        the ``files`` of its folder."""
        marked = {name for f in files if keys.is_damage_mark(name := f.removeprefix(_PREFIX))}
        if not marked or (name := damage_mark(commit.line)) not in marked:
            return None
        checkpoint = commit.line.checkpoint
        try:
            reason = self.read(checkpoint, name).reason
        except TierfallError:  # that it is there is what counts
            reason = f"{_PREFIX}{name} says so"
        return f"{checkpoint} was found damaged: {reason}"

    def forget_damage(self, checkpoint: CheckpointId) -> None:
        """Remove all damage marks beside a checkpoint."""
        for name in filter(keys.is_damage_mark, self._names(checkpoint)):
            self._backend.delete(self._key(checkpoint, name))

    # Keys ----------------------------------------------------------------------------------------

    def _report_change(self) -> None:
        """Last, so that who reads this reads the mark too. It stays unread here as well: what somebody else said a
        moment ago may just be written over."""
        text = f"{secrets.token_hex(16)}\n".encode()
        self._documents.replace(f"{self._run}/{keys.MARKS_CHANGED_NAME}", text)

    def _changed(self) -> bytes:
        try:
            return self._documents.read(f"{self._run}/{keys.MARKS_CHANGED_NAME}")
        except KeyNotFoundError:
            return b""

    def _names(self, checkpoint: CheckpointId) -> list[str]:
        prefix = self._key(checkpoint, "")
        return [stored.key.removeprefix(prefix) for stored in self._backend.scan(prefix)]

    def _key(self, checkpoint: CheckpointId, name: str) -> str:
        return f"{keys.step_prefix(self._run, checkpoint)}{_PREFIX}{name}"
