"""The checkpoints of one run on one tier: folders, commit records, attempts and lineage, as a scan shows them.

A checkpoint is a step folder with a commit record. A commit record is read once and cached while listings show it
unchanged; a record that is damaged or could not be read is read again by the next listing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from tierfall.core.format.catalog import FoundCopy, Listing, StepFolderError
from tierfall.core.format.commit_files import without_index, wrong_files
from tierfall.core.format.documents import read_twice
from tierfall.core.format.records import Commit, parse_commit
from tierfall.core.runtime.bounded_calls import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.lineage import AttemptStart
from tierfall.core.types.values import CheckpointId, CopyState
from tierfall.tiers.attempts import LineageRecords, start_from_name
from tierfall.tiers.documents import Documents
from tierfall.tiers.marks import Marks, marks_among

CommitResult = Commit | IntegrityError | NotSupportedError | None
"""A commit record, why it cannot be used, or None where it was deleted after the listing."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """One scan of a run: the files of each step folder by their names in it, attempt numbers, lineage records."""

    folders: dict[CheckpointId, dict[str, StoredObject]]
    attempts: tuple[int, ...]
    starts: tuple[AttemptStart, ...]


class TierCatalog:
    """Lists one run on one tier. May be used by several threads."""

    def __init__(
        self,
        documents: Documents,
        marks: Marks,
        lineage: LineageRecords,
        *,
        links: Callable[[str], Iterable[str]],
        parallel: int,
    ) -> None:
        """``links`` returns the names of the symbolic links in a folder, which scans leave out. ``parallel`` bounds
        concurrent requests."""
        self._tier = documents.tier
        self._run = documents.run
        self._backend = documents.backend
        self._documents = documents
        self._marks = marks
        self._lineage = lineage
        self._links = links
        self._parallel = parallel
        self._cache: dict[CheckpointId, tuple[tuple[int, str], Commit]] = {}
        self._synced: set[CheckpointId] = set()

    def list(self) -> Listing:
        """List the run. Raises the error of a tier that does not answer."""
        self._marks.begin()  # before the scan, so that a mark written during it is not missed
        scan = self._scan()
        folders = scan.folders
        commits = self._read_commits(
            {
                checkpoint: files[keys.COMMIT_NAME]
                for checkpoint, files in folders.items()
                if keys.COMMIT_NAME in files
            }
        )
        copies = [
            self._with_damage(_found(checkpoint, folders[checkpoint], commit), folders[checkpoint])
            for checkpoint, commit in commits.items()
            if commit is not None
        ]
        if any(copy.commit is not None and copy.damage is not None for copy in copies):
            # A checkpoint that was committed during the scan can appear without some of its files: scan again.
            again = self._scan().folders
            copies = [self._with_damage(c, again[c.id]) for c in copies if c.id in again]
            folders = {**folders, **again}
        copies = [self._with_damage_mark(copy, folders[copy.id]) for copy in copies]
        return Listing(
            tier=self._tier,
            copies=tuple(sorted(copies, key=lambda c: c.id)),
            unfinished={
                checkpoint: _bytes(files.values())
                for checkpoint, files in folders.items()
                if keys.COMMIT_NAME not in files
            },
            attempts=scan.attempts,
            starts=scan.starts,
            damaged=tuple(self._not_folders([id for id, files in folders.items() if "" in files])),
        )

    def find(self, checkpoint: CheckpointId) -> FoundCopy | None:
        """Read one copy as ``list`` reads all; None where it has no commit record."""
        copy = self._find(checkpoint)
        if copy is None or copy.damage is not None:  # it may be in the middle of its commit
            copy = self._find(checkpoint)
        return copy

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        return read_twice(lambda: self._read_commit(checkpoint, None))

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Ask the backend whether a commit record exists."""
        return self._documents.exists(self._key(checkpoint, keys.COMMIT_NAME))

    def files(self, checkpoint: CheckpointId) -> tuple[StoredObject, ...]:
        """List all files of a step folder, by their names in it."""
        prefix = keys.step_prefix(self._run, checkpoint)
        return tuple(
            replace(stored, key=stored.key.removeprefix(prefix))
            for stored in self._backend.scan(prefix)
        )

    def sync_commit(self, checkpoint: CheckpointId) -> None:
        """Make an existing commit record durable, once: its writer may have failed, or died, between publishing it and
        the last fsync. Costs one fsync of the step folder, and nothing on an object store.

        Raises BackendError where the record may not survive a power cut: then no decision may rely on this copy.
        """
        if checkpoint not in self._synced:
            self._documents.sync(self._key(checkpoint, keys.COMMIT_NAME))
            self._synced.add(checkpoint)

    def note_synced(self, checkpoint: CheckpointId) -> None:
        """Record that this process has written the commit record, durably."""
        self._synced.add(checkpoint)

    def forget(self, checkpoint: CheckpointId) -> None:
        """Remove a checkpoint from the cache before it is deleted."""
        self._synced.discard(checkpoint)
        self._cache.pop(checkpoint, None)

    # Scans ---------------------------------------------------------------------------------------

    def _scan(self) -> _Scan:
        folders: dict[CheckpointId, dict[str, StoredObject]] = {}
        attempts: list[int] = []
        starts: list[AttemptStart] = []
        for stored in self._backend.scan(f"{self._run}/"):
            folder, _, rest = stored.key.removeprefix(f"{self._run}/").partition("/")
            if folder == keys.ATTEMPTS_FOLDER and (number := keys.parse_attempt(rest)):
                attempts.append(number)
            elif folder == keys.LINEAGE_FOLDER and (start := start_from_name(rest)):
                starts.append(start)
                self._lineage.note(start.key)
            elif checkpoint := keys.parse_step_folder(folder):
                folders.setdefault(checkpoint, {})[rest] = stored
        return _Scan(folders, tuple(sorted(attempts)), tuple(starts))

    def _find(self, checkpoint: CheckpointId) -> FoundCopy | None:
        files = {file.key: file for file in self.files(checkpoint)}
        listed = files.get(keys.COMMIT_NAME)
        commit = None if listed is None else self._cached_commit(checkpoint, listed)
        if commit is None:
            return None
        copy = self._with_damage(_found(checkpoint, files, commit), files)
        return self._with_damage_mark(copy, files)

    def _not_folders(self, files: Iterable[CheckpointId]) -> Iterator[StepFolderError]:
        """Report files, and symbolic links, that have the name of a step folder; scans do not follow links."""
        advice = dict.fromkeys(files, "is a file where the folder of a step is to be: move it away")
        for name in self._links(self._run):
            if checkpoint := keys.parse_step_folder(name):
                advice[checkpoint] = (
                    "is a symbolic link where the folder of a step is to be, and none is followed below the tier's "
                    "folder, so that the step is not read: put the folder itself there, or remove the link"
                )
        for checkpoint, problem in sorted(advice.items()):
            path = f"{self._run}/{keys.step_folder(checkpoint)}"
            yield StepFolderError(f"{self._tier}: {path} {problem}", checkpoint)

    # Damage --------------------------------------------------------------------------------------

    def _with_damage(self, copy: FoundCopy, files: Mapping[str, StoredObject]) -> FoundCopy:
        """Compare a folder's file names and sizes with its commit record. A copy is whole without its index, which can
        be rebuilt from the manifests."""
        if copy.commit is None:
            return copy
        sizes = {name: stored.bytes for name, stored in files.items()}
        wrong = list(wrong_files(without_index(copy.commit), sizes))
        if not wrong:
            return replace(copy, damage=None)
        name, problem = wrong[0]
        more = f"; {len(wrong) - 1} more of its files are not whole" if wrong[1:] else ""
        what = self._documents.what(self._key(copy.id, name))
        return replace(copy, damage=IntegrityError(f"{what}: {problem}{more}"))

    def _with_damage_mark(self, copy: FoundCopy, files: Iterable[str]) -> FoundCopy:
        """Report a copy as damaged that any reader has marked so."""
        if copy.commit is None or copy.damage is not None:
            return copy
        why = self._marks.damage_of(copy.commit, files)
        return copy if why is None else replace(copy, damage=IntegrityError(f"{self._tier}: {why}"))

    # Commit records ------------------------------------------------------------------------------

    def _read_commits(
        self, listed: Mapping[CheckpointId, StoredObject]
    ) -> dict[CheckpointId, CommitResult]:
        """Return the commit records of a listing, and read those that are not cached, several at a time."""
        cached = {
            id: commit
            for id, (version, commit) in list(self._cache.items())
            if id in listed and version == _version(listed[id])
        }
        new = [id for id in listed if id not in cached]
        found = dict(
            zip(
                new,
                run_in_parallel(
                    lambda id: self._try_read(id, listed[id].bytes), new, parallel=self._parallel
                ),
                strict=True,
            )
        )
        read = {id: commit for id, commit in found.items() if isinstance(commit, Commit)}
        self._cache = {
            id: (_version(listed[id]), commit) for id, commit in {**cached, **read}.items()
        }
        return {id: cached[id] if id in cached else found[id] for id in listed}

    def _cached_commit(self, id: CheckpointId, listed: StoredObject) -> CommitResult:
        version, commit = self._cache.get(id, (None, None))
        if commit is not None and version == _version(listed):
            return commit
        found = self._try_read(id, listed.bytes)
        if isinstance(found, Commit):
            self._cache[id] = (_version(listed), found)
        return found

    def _try_read(self, id: CheckpointId, size_bytes: int) -> CommitResult:
        try:
            return self._read_listed(id, size_bytes)
        except KeyNotFoundError:
            return None
        except (IntegrityError, NotSupportedError) as error:
            return error

    def _read_listed(self, id: CheckpointId, size_bytes: int) -> Commit:
        """Read a record by its listed size. One that has another size, or is damaged, may have been replaced since the
        listing: it is read again by its present size."""
        try:
            return self._read_commit(id, size_bytes)
        except KeyNotFoundError:
            raise
        except (IntegrityError, BackendError) as error:
            if isinstance(error, BackendError) and error.retryable:
                raise
        return self._read_commit(id, None)

    def _read_commit(self, checkpoint: CheckpointId, size_bytes: int | None) -> Commit:
        key = self._key(checkpoint, keys.COMMIT_NAME)
        data = self._documents.read(key, bytes_known=size_bytes)
        commit = parse_commit(data, what=self._documents.what(key))
        if commit.lineage.checkpoint != checkpoint or commit.lineage.run != self._run:
            raise IntegrityError(
                f"{self._documents.what(key)}: is the record of {commit.lineage.run} {commit.lineage.checkpoint}: "
                "it was moved here from elsewhere"
            )
        return commit

    def _key(self, checkpoint: CheckpointId, name: str) -> str:
        return keys.step_prefix(self._run, checkpoint) + name


def _found(
    checkpoint: CheckpointId, files: dict[str, StoredObject], commit: CommitResult
) -> FoundCopy:
    return FoundCopy(
        id=checkpoint,
        state=CopyState.COMMITTED,
        bytes=_bytes(files.values()),
        commit=commit if isinstance(commit, Commit) else None,
        damage=commit if isinstance(commit, TierfallError) else None,
        marks=marks_among(files),
    )


def _bytes(files: Iterable[StoredObject]) -> int:
    return sum(file.bytes for file in files)


def _version(stored: StoredObject) -> tuple[int, str]:
    return stored.bytes, stored.version
