"""A tier that keeps checkpoints in a backend: local NVMe, a parallel file system, an object store.

It owns the names and the order in which a checkpoint comes to exist: images, manifests, then the commit record. It
makes no decisions, and imports no backend.

A checkpoint is a step folder with a commit record. A commit record is read once and cached while listings show it
unchanged; a record that is damaged or could not be read is read again by the next listing.

A listing proves neither that something is there nor that it is not: one that lags, or leaves out what it may not read,
looks like any other. So each record that should exist, and each file that a record names, is asked for by key before it
counts as absent.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

from tierfall.core.copies.image_writes import ImageUpload
from tierfall.core.flush.tasks import KeptFreeError
from tierfall.core.format.catalog import FoundCopy, Listing, NotReadError
from tierfall.core.format.commit_files import same_checkpoint, shards_of, wrong_files
from tierfall.core.format.decided import FENCE_VALID_S, DecidedList, Word
from tierfall.core.format.documents import Spliced, read_twice
from tierfall.core.format.records import Attempt, Commit, Geometry, TierRecord, parse_commit
from tierfall.core.runtime.conditions import Conditions
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.runtime.threads import run_in_parallel
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, Publish, StoredObject, delete_all
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    StorageFullError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.lineage import AttemptStart, abandoned_by
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId, Codec, CopyState, Shard
from tierfall.tiers.image_writer import Compression, PackedImageWriter, Packing, RawImageWriter
from tierfall.tiers.run_files import (
    ContradictionError,
    DecidedFolder,
    Documents,
    Fence,
    LatestHint,
    LineageRecords,
    SetIdentityCheck,
    TierRecordFile,
)

logger = logging.getLogger("tierfall")


FEW = 32
"""A listing with no more commit records than these is read whole."""
CommitResult = Commit | TierfallError | None
"""A commit record, why it cannot be used, or None where there is none."""
FREED_S = 6.0
"""Seconds until a file system shows what a deletion has freed: ZFS frees every five seconds."""
REQUESTS_AT_ONCE_MIN = 32
REQUESTS_FOR_EACH = 4
"""Concurrent small requests: this many for each large one that the backend's ``max_parallel`` allows, and at least
REQUESTS_AT_ONCE_MIN."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """One scan of a run: the files of each step folder by their names in it, attempt numbers, lineage records, what is
    decided, and the size of ``latest`` if it is there."""

    folders: dict[CheckpointId, dict[str, StoredObject]]
    attempts: tuple[int, ...]
    starts: tuple[AttemptStart, ...]
    decided: DecidedList
    latest_bytes: int | None

    @property
    def records(self) -> dict[CheckpointId, StoredObject]:
        """The commit records."""
        folders = self.folders.items()
        return {id: files[keys.COMMIT_NAME] for id, files in folders if keys.COMMIT_NAME in files}

    def deciding(self) -> set[CheckpointId]:
        """Return the newest checkpoint that nothing here abandons or deletes, and the newest of each attempt without a
        lineage record: its commit record says how the attempt began."""
        is_abandoned = abandoned_by(self.starts)
        live = (id for id in self.records if not self.decided.is_deleted(id, None))
        newest = max((id for id in live if not is_abandoned(id, None)), default=None)
        known = {start.attempt for start in self.starts}
        found = {id.attempt: id for id in sorted(self.records) if id.attempt not in known}
        return {*found.values()} | ({newest} if newest else set())

    @property
    def origin(self) -> CheckpointId | None:
        """The checkpoint that the newest attempt with a lineage record started from."""
        newest = max(self.starts, key=lambda start: start.attempt, default=None)
        return None if newest is None else newest.started_from


class NamedInVainError(BackendError):
    """``latest`` names a checkpoint that has no commit record; where its folder is, is not known."""


class StoredTier:
    """One run's checkpoints on one tier. All methods block, and may be called from several threads.

    ``fence`` has the run's attempts, ``decided`` what is decided about its checkpoints, ``marker`` the tier record,
    ``latest`` the file that names the newest checkpoint.
    """

    def __init__(
        self,
        *,
        name: str,
        run: str,
        backend: Backend,
        packing: Packing | None = None,
        pace: RateLimiter | None = None,
        read_only: str = "",
        last_answer_s: Callable[[], float] = lambda: -math.inf,
        set_identity_check: SetIdentityCheck | None = None,
        names: Callable[[str], Iterable[str]] = lambda folder: (),
        record: TierRecord | None = None,
        room_bytes: Callable[[CheckpointId | None], float] = lambda id: math.inf,
    ) -> None:
        """With ``packing``, images are written packed; images of any codec are read.

        ``pace`` limits the rate of writes to ``backend``. ``read_only`` is the reason why ``backend`` was opened for
        reading only, '' where it was not. ``last_answer_s`` returns when the medium last answered, on the monotonic
        clock. ``set_identity_check`` is the method of that name of a backend whose folder can be mounted anew.
        ``names`` returns all names directly in a folder, also those that scans leave out, such as links; none where the
        medium has no folders. ``record`` is the tier record, where it was read before. ``room_bytes`` asks the medium
        how much may be written without less staying free than it is to keep; with what is there of a checkpoint.
        """
        self.name = name
        self.backend = backend
        self.read_only = read_only
        self.last_answer_s = last_answer_s
        self.room_bytes = room_bytes
        self._refused_bytes = -math.inf
        self._run = run
        self._documents = documents = Documents(name, run, backend)
        self._packing = packing
        self._pace = pace
        self._bytes_per_s_max = None if pace is None else pace.bytes_per_second
        self._conditions = Conditions()
        at_once = REQUESTS_FOR_EACH * backend.traits.max_parallel
        self._parallel = max(REQUESTS_AT_ONCE_MIN, at_once)
        self._names = names
        self.decided = DecidedFolder(documents)
        self.marker = TierRecordFile(documents, set_identity_check, record)
        self.latest = LatestHint(documents)
        self.fence = Fence(documents, self.marker.recreate)
        self._lineage = LineageRecords(documents, self.fence)
        self._cache: dict[CheckpointId, tuple[tuple[int, str], Commit]] = {}
        self._synced: set[CheckpointId] = set()

    @property
    def place(self) -> str:
        return self.backend.place

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Limit writes to so many bytes of raw image a second, and never above the configured rate; None: only the
        configured rate."""
        if self._pace is None:
            return
        if bytes_per_s is not None and self.compression is not None:
            bytes_per_s /= self.compression.ratio
        bounds = [bound for bound in (bytes_per_s, self._bytes_per_s_max) if bound is not None]
        self._pace.set_rate(min(bounds, default=None))

    def close(self) -> None:
        self.backend.close()

    # Listing ------------------------------------------------------------------------------------------

    def list(self, *, newest: bool = False) -> Listing:
        """List the run on this tier. Where the tier does not answer, the listing holds the error.

        ``newest``: of more than FEW commit records that were not read before, only that of the newest checkpoint is
        read, and those that tell which one it is. The other copies have a NotReadError."""
        try:
            return self._list(newest=newest)
        except TierfallError as error:
            return Listing(tier=self.name, error=error)

    def _list(self, *, newest: bool) -> Listing:
        scan = self._scan()
        latest = self._read_latest(scan)
        folders, commits = scan.folders, self._read_commits(scan, latest, newest=newest)
        lags = False
        unlisted = {id for id, found in commits.items() if isinstance(found, Commit)}
        if unlisted := unlisted - scan.records.keys():
            # A checkpoint that was committed during the scan can be left out, too: scan again.
            again = self._scan()
            lags = not unlisted <= again.records.keys()
            folders = {**folders, **{id: again.folders.get(id, {}) for id in unlisted}}
        if latest is not None and commits.get(latest) is None and self._read_latest(scan) == latest:
            # Whoever deletes a checkpoint has ``latest`` name another one before, so tierfall did not delete this one.
            what = self._documents.what(self._key(latest, keys.COMMIT_NAME))
            commits[latest] = NamedInVainError(
                f"{what}: it is not there. If the step's folder was moved, or is not mounted, bring it back. If a "
                f"person deleted it, 'tierfall verify --tier {self.name} --repair' has {keys.LATEST_NAME!r} name "
                "another one"
            )
        copies = [
            _found(id, folders.get(id, {}), commit)
            for id, commit in commits.items()
            if commit is not None
        ]
        self.marker.out_of_reach = None
        copies = [*self._examine(copies, folders)]
        failures = (copy.damage for copy in copies if isinstance(copy.damage, UnreachableError))
        if (failure := next(failures, None)) is not None:
            # What is missing may be out of reach, too.
            self.marker.out_of_reach = failure
            missing = [copy for copy in copies if copy.repairable]
            others = [copy for copy in copies if not copy.repairable]
            copies = [*others, *self._examine(missing, folders)]
        contradictions = (ContradictionError, NamedInVainError)
        lags = lags or any(isinstance(copy.damage, contradictions) for copy in copies)
        return Listing(
            tier=self.name,
            copies=tuple(sorted(copies, key=lambda c: c.id)),
            unfinished={
                checkpoint: _bytes(files.values())
                for checkpoint, files in folders.items()
                if files and "" not in files and commits.get(checkpoint) is None
            },
            attempts=scan.attempts,
            starts=scan.starts,
            decided=scan.decided,
            lags=lags,
        )

    def find_copy(self, checkpoint: CheckpointId) -> FoundCopy | None:
        """Read one copy as ``list`` reads all; None where it has no commit record, and the tier's id can be read."""
        files = {file.key: file for file in self.files(checkpoint)}
        commit = self._cached_commit(checkpoint, files.get(keys.COMMIT_NAME))
        if commit is None:
            what = self._documents.what(self._key(checkpoint, keys.COMMIT_NAME))
            self.marker.confirm_absence(KeyNotFoundError(f"{what}: it is not there"))
            return None
        self.decided.read(max_age_s=FENCE_VALID_S)
        return self._with_damage(_found(checkpoint, files, commit), files)

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        with self._reading(checkpoint, keys.COMMIT_NAME):
            return self._read_commit(checkpoint)

    def written_commit(self, checkpoint: CheckpointId) -> Commit:
        """Read the record of what this node has written; of peer memory, that is not what it keeps."""
        return self.read_commit(checkpoint)

    def is_committed(self, checkpoint: CheckpointId) -> bool:
        """Whether a checkpoint is committed here: one request."""
        return self._documents.exists(self._key(checkpoint, keys.COMMIT_NAME))

    def files(
        self, checkpoint: CheckpointId, commit: Commit | None = None
    ) -> tuple[StoredObject, ...]:
        """List all files of a step folder, by their names in it. The store is asked by key for those that ``commit``
        names and the listing does not show."""
        prefix = keys.step_prefix(self._run, checkpoint)
        found = [
            replace(stored, key=stored.key.removeprefix(prefix))
            for stored in self.backend.scan(prefix)
        ]
        if commit is not None:
            missing = {file.name for file in commit.files} - {file.key for file in found}
            found += self._by_key(checkpoint, sorted(missing))
        return tuple(found)

    def sync_commit(self, checkpoint: CheckpointId) -> None:
        """Make an existing commit record durable, once: its writer may have failed, or died, between publishing it and
        the last fsync. Costs one fsync of the step folder, and nothing on an object store.

        Raises BackendError where the record may not survive a power cut: then no decision may rely on this copy.
        """
        if checkpoint not in self._synced:
            self._documents.sync(self._key(checkpoint, keys.COMMIT_NAME))
            self._synced.add(checkpoint)

    @contextmanager
    def _reading(self, checkpoint: CheckpointId, name: str) -> Iterator[str]:
        """Yield the key of a file of a checkpoint. The answer that it is absent stands only if the tier's id can be
        read, and no listing shows the file."""
        key = self._key(checkpoint, name)
        try:
            yield key
        except KeyNotFoundError as error:
            self.marker.confirm_absence(error, key)
            raise

    # Scans ---------------------------------------------------------------------------------------

    def _scan(self) -> _Scan:
        folders: dict[CheckpointId, dict[str, StoredObject]] = {}
        attempts: list[int] = []
        starts: list[AttemptStart] = []
        decided: list[str] = []
        latest_bytes = None
        began_s = time.monotonic()
        names = tuple(self._names(self._run))
        for stored in self._objects(names):
            folder, _, rest = stored.key.removeprefix(f"{self._run}/").partition("/")
            if folder == keys.ATTEMPTS_FOLDER and (number := keys.parse_attempt(rest)):
                attempts.append(number)
            elif folder == keys.LINEAGE_FOLDER and (start := keys.parse_start(rest)):
                starts.append(start)
                self._lineage.note(start.key)
            elif folder == keys.DECIDED_FOLDER:
                decided.append(rest)
            elif folder == keys.LATEST_NAME:
                latest_bytes = stored.bytes
            elif checkpoint := keys.parse_step_folder(folder):
                folders.setdefault(checkpoint, {})[rest] = stored
        for name in names:
            if checkpoint := keys.parse_step_folder(name):
                folders.setdefault(checkpoint, {})
        known = self.decided.note(decided, began_s)
        return _Scan(folders, tuple(sorted(attempts)), tuple(starts), known, latest_bytes)

    def _objects(self, names: Iterable[str]) -> Iterable[StoredObject]:
        """Return the objects of the run, without those in step folders that cannot be listed."""
        prefix = f"{self._run}/"
        try:
            return list(self.backend.scan(prefix))
        except BackendError as error:
            failure = error
        steps = [name for name in names if keys.parse_step_folder(name)]
        found: list[StoredObject] = []
        for name in names if steps else ():
            try:
                found += self.backend.scan(f"{prefix}{name}/")
            except BackendError:  # the record of a step is asked for by key, which tells why
                if name not in steps:
                    raise failure from None
        if not found:
            raise failure
        return found

    def _read_latest(self, scan: _Scan) -> CheckpointId | None:
        """Read which checkpoint ``latest`` names. None also if it may not be read, such as a link that a person made,
        and the scan shows checkpoints."""
        try:
            return self.latest.read(scan.latest_bytes)
        except BackendError as error:
            if error.retryable or not scan.records:
                raise
            return None

    # Damage --------------------------------------------------------------------------------------

    def _examine(
        self,
        copies: Iterable[FoundCopy],
        folders: Mapping[CheckpointId, Mapping[str, StoredObject]],
    ) -> Iterable[FoundCopy]:
        """Note the damage of copies; leave out those that were deleted meanwhile."""
        copies = tuple(copies)
        suspect = [c for c in copies if c.commit and _suspects(c.commit, folders.get(c.id, {}))]

        def examine(copy: FoundCopy) -> FoundCopy | None:
            return self._with_damage(copy, folders.get(copy.id, {}))

        asked = run_in_parallel(examine, suspect, parallel=self._parallel)  # these take requests
        examined = dict(zip((copy.id for copy in suspect), asked, strict=True))
        found = (examined[c.id] if c.id in examined else examine(c) for c in copies)
        return (copy for copy in found if copy is not None)

    def _with_damage(self, copy: FoundCopy, files: Mapping[str, StoredObject]) -> FoundCopy | None:
        """Note what is wrong with a copy, by its files and by what is decided; None if it was deleted meanwhile."""
        if copy.commit is None:
            return copy
        damage: TierfallError | None
        try:
            damage = self._wrong_file(copy.commit, files)
            if damage is not None and not self.is_committed(copy.id):
                return None
        except TierfallError as error:
            damage = error
        found = self.decided.known.damage(copy.id, copy.commit.lineage.attempt_id)
        if damage is None and found is not None:
            why = self.decided.reason(found).removeprefix(f"{self.name}: ")
            damage = IntegrityError(f"{self.name}: {copy.id} was found damaged: {why}")
        return replace(copy, damage=damage)

    def _wrong_file(
        self, commit: Commit, files: Mapping[str, StoredObject]
    ) -> IntegrityError | None:
        """Compare a folder's file names and sizes with its commit record; return what is wrong.

        Files that the listing shows wrong are asked for by key, one of them first: if it is wrong, so is the copy.
        Raises the error of a file that could not be looked at.
        """
        checkpoint, sizes = commit.lineage.checkpoint, _sizes(files)
        suspects = _suspects(commit, files)
        if not suspects:
            return None
        for group in (suspects[:1], suspects[1:]):
            sizes = {name: size for name, size in sizes.items() if name not in group}
            asked = self._by_key(checkpoint, group, listed=files)
            sizes |= {file.key: file.bytes for file in asked}
            wrong = [
                (name, problem) for name, problem in wrong_files(commit, sizes) if name in group
            ]
            if not wrong:
                continue
            name, problem = wrong[0]
            what = self._documents.what(self._key(checkpoint, name))
            others = suspects[1:] if name == suspects[0] else wrong[1:]
            more = f"; {len(others)} more of its files are not whole" if others else ""
            return IntegrityError(f"{what}: {problem}{more}")
        return None

    def _by_key(
        self, checkpoint: CheckpointId, names: Iterable[str], *, listed: Collection[str] = ()
    ) -> Sequence[StoredObject]:
        """Ask the store for files of a checkpoint; return those that are there, by their names in the folder.

        Raises the error of a file that could not be looked at; one that was ``listed`` is not absent by the store's
        answer alone.
        """

        def stat(name: str) -> StoredObject | None:
            key = self._key(checkpoint, name)
            try:
                return replace(self.backend.stat(key), key=name)
            except KeyNotFoundError as error:
                self.marker.confirm_absence(error, key if name in listed else None)
                return None

        asked = run_in_parallel(stat, names, parallel=self._parallel)
        return [found for found in asked if found is not None]

    # Commit records ------------------------------------------------------------------------------

    def _read_commits(
        self, scan: _Scan, latest: CheckpointId | None, *, newest: bool
    ) -> dict[CheckpointId, CommitResult]:
        """Return the commit records of a scan, and read those that are not cached, several at a time. Those of its
        other step folders, and of the checkpoints that ``latest`` and the lineage name, are asked for by key.
        ``newest`` is as in ``list``.

        Raises the error of a tier that gave up answering: no record of it could be read.
        """
        listed = scan.records
        cached = {
            id: commit
            for id, (version, commit) in list(self._cache.items())
            if id in listed and version == _version(listed[id])
        }
        named = {id for id in (latest, scan.origin) if id is not None}
        new = sorted((scan.folders.keys() | named) - cached.keys())
        later: set[CheckpointId] = set()
        if newest and len(listed.keys() - cached.keys()) > FEW:
            later = listed.keys() - cached.keys() - scan.deciding()
            new = [id for id in new if id not in later]
        sizes = [listed[id].bytes if id in listed else None for id in new]
        read = run_in_parallel(
            lambda asked: self._try_read(*asked),
            zip(new, sizes, strict=True),
            parallel=self._parallel,
        )
        found = dict(zip(new, read, strict=True))
        good = {id: commit for id, commit in found.items() if isinstance(commit, Commit)}
        silent = [x for x in found.values() if isinstance(x, TierfallError) and x.retryable]
        if silent and not (good or cached):
            raise silent[0]
        for id, files in scan.folders.items():
            if "" in files and not isinstance(found.get(id), Commit) and id not in cached:
                path = f"{self._run}/{keys.step_folder(id)}"
                found[id] = BackendError(
                    f"{self.name}: {path} is a file where the folder of a step is to be: move it away"
                )
        now = {id: (_version(listed[id]), good[id]) for id in good.keys() & listed}
        self._cache = {id: x for id, x in list(self._cache.items()) if id in listed} | now
        for id in later:
            what = self._documents.what(self._key(id, keys.COMMIT_NAME))
            found[id] = NotReadError(f"{what}: it was not read yet")
        return {**found, **cached}

    def _cached_commit(self, id: CheckpointId, listed: StoredObject | None) -> CommitResult:
        if listed is None:
            return self._try_read(id, None)
        version, commit = self._cache.get(id, (None, None))
        if commit is not None and version == _version(listed):
            return commit
        found = self._try_read(id, listed.bytes)
        if isinstance(found, Commit):
            self._cache[id] = (_version(listed), found)
        return found

    def _try_read(self, id: CheckpointId, size_bytes: int | None) -> CommitResult:
        """Return a record, or why it could not be read; None if it is not there, or was deleted since the listing that
        shows its size."""
        try:
            try:
                return self._read_commit(id, size_bytes)
            except KeyNotFoundError as error:
                if size_bytes is not None:
                    self.marker.confirm_absence(error, self._key(id, keys.COMMIT_NAME))
                return None
        except TierfallError as error:
            return error

    def _read_commit(self, checkpoint: CheckpointId, size_bytes: int | None = None) -> Commit:
        """Read a record, by its listed size if it is known. One that has another size, or is damaged, may have been
        replaced since the listing: it is read again by its present size."""
        if size_bytes is not None:
            try:
                return self._parse_commit(checkpoint, size_bytes)
            except TierfallError as error:
                if isinstance(error, KeyNotFoundError) or not error.is_damage:
                    raise
        return read_twice(lambda: self._parse_commit(checkpoint, None))

    def _parse_commit(self, checkpoint: CheckpointId, size_bytes: int | None) -> Commit:
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

    # Files of a checkpoint -----------------------------------------------------------------------

    def read_manifest(
        self, checkpoint: CheckpointId, shard: Shard, *, length: int | None = None
    ) -> bytes:
        with self._reading(checkpoint, keys.manifest_name(shard)) as key:
            return self._documents.read(key, bytes_known=length)

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        """Read the frame table of a packed image."""
        with self._reading(checkpoint, keys.stored_name(shard)) as key:
            return self._documents.read(key)

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        """Fill ``view`` from ``offset`` of the file of a shard's image, which ``codec`` has packed."""
        with self._reading(checkpoint, keys.shard_name(shard, codec)) as key:
            self.backend.read_into(key, offset, view)

    def read_cached(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        end: int,
        views: Iterable[memoryview],
        *,
        codec: Codec = Codec.NONE,
    ) -> bool:
        """Fill ``views`` with ``offset`` to ``end`` of that file if it is in the page cache; False, with nothing read,
        if it is not."""
        with self._reading(checkpoint, keys.shard_name(shard, codec)) as key:
            return self.backend.read_cached(key, offset, end, views)

    @property
    def cache_never_waits(self) -> bool:
        return self.backend.traits.cache_never_waits

    @property
    def is_packed(self) -> bool:
        return self._packing is not None

    @property
    def compression(self) -> Compression | None:
        """What was packed so far; None where images are stored raw."""
        return None if self._packing is None else self._packing.compression

    def check_room(self, needed_bytes: int, checkpoint: CheckpointId | None = None) -> None:
        """Raise KeptFreeError if so many bytes more, with what is there of ``checkpoint``, leave less free than is to
        be kept. A copy is deleted then; if there is no more room at the next call, that has not shown yet: wait, or a
        second copy would go."""
        until_s, refused = time.monotonic() + FREED_S, self._refused_bytes
        while (room_bytes := self.room_bytes(checkpoint)) < needed_bytes:
            self._refused_bytes = room_bytes
            if room_bytes > refused or time.monotonic() > until_s:
                raise KeptFreeError(
                    f"{self.name}: {format_size(needed_bytes)} are to be written, and there is room for "
                    f"{format_size(max(0, int(room_bytes)))} beside what is to stay free (keep_free)"
                )
            time.sleep(0.1)
        self._refused_bytes = -math.inf

    def create_shard(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        cut: Geometry,
        pieces: Spliced,
        *,
        attempt_id: str | None = None,
        resumes: bool = False,
    ) -> ImageUpload:
        """Begin a shard's image. ``cut`` is its division into chunks, ``pieces`` its tensors in the manifest. Peer
        memory may have the image of that ``attempt_id`` already. ``resumes``: continue what another upload of these
        bytes has left, and leave what this one has sent if it is aborted."""
        packing, publish = self._packing, Publish.RESUME if resumes else Publish.REPLACE
        if packing is None:
            key = self._key(checkpoint, keys.shard_name(shard))
            writer = self.backend.create(key, length=cut.image_bytes, publish=publish)
            return RawImageWriter(writer)
        key = self._key(checkpoint, keys.shard_name(shard, packing.codec))
        record = self._key(checkpoint, keys.stored_name(shard))
        return PackedImageWriter(
            lambda bound: self.backend.create(key, length_max=bound, publish=publish),
            packing,
            shard=shard,
            cut=cut,
            pieces=pieces,
            part_bytes_min=self.backend.traits.part_bytes_min,
            write_record=lambda data: self._documents.replace(record, data),
        )

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None:
        self._documents.replace(self._key(checkpoint, keys.manifest_name(shard)), data)

    # Commit --------------------------------------------------------------------------------------

    def commit(self, commit: Commit, *, attempt: Attempt, repairs: bool = False) -> None:
        """Write a checkpoint's commit record, unless a newer attempt fences ``attempt``.

        A second call for the same checkpoint, after a lost reply or by the next start, succeeds. Raises FencedError,
        and IntegrityError where another checkpoint of that id is committed: it is never overwritten. A record of this
        one with the images of other ranks is replaced. ``repairs``: the existing copy is known to be this checkpoint,
        damaged. Its record is replaced, and its files in other codecs are deleted.
        """
        began_s = time.monotonic()
        self.fence.check(attempt)
        checkpoint, is_new = commit.lineage.checkpoint, True
        if repairs:
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._synced.add(checkpoint)
            self.delete_other_codecs(commit, attempt=attempt)
        else:
            is_new = self._create_commit(commit, attempt)
        try:
            if is_new:
                self.note_mended(commit)
        except BackendError as error:
            # The copy is committed all the same, and counts as damaged until it is read.
            text = "%s: that the copy of %s is whole again is not noted: %s"
            logger.warning(text, self.name, checkpoint, error)
        # A newer start may have deleted the folder in between, as unfinished.
        if time.monotonic() - began_s > FENCE_VALID_S:
            self.fence.check(attempt)
        try:
            self.record_lineage(commit, attempt)
        except BackendError as error:  # a deletion of this attempt's checkpoints records it first
            self._conditions.report(
                checkpoint.attempt, logging.WARNING,
                "%s: how attempt %d began is not recorded yet: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip

    def _create_commit(self, commit: Commit, attempt: Attempt) -> bool:
        """Create a commit record; return False if the same one was there."""
        checkpoint = commit.lineage.checkpoint
        try:
            self._documents.create(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
        except KeyExistsError:
            found = self.read_commit(checkpoint)
            is_same = found.lineage == commit.lineage and found.files == commit.files
            if is_same and self.backend.traits.durable:
                self.sync_commit(checkpoint)
                return False
            if not (is_same or (shards_of(commit) and same_checkpoint(found, commit))):
                raise IntegrityError(
                    f"commit on {self.name}: {checkpoint} was committed before with other content; "
                    "it is left as it is"
                ) from None
            # An earlier start's: with images of other ranks, or packed otherwise.
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._synced.add(checkpoint)
            if not is_same:
                self.delete_other_codecs(commit, attempt=attempt)
            return not is_same
        self._synced.add(checkpoint)
        return True

    def record_lineage(self, commit: Commit, writer: Attempt | None = None) -> None:
        """Record how the attempt of a committed checkpoint began; see ``LineageRecords.create``."""
        self._lineage.create(commit, writer)
        number = commit.lineage.checkpoint.attempt
        self._conditions.end(number, "%s: how attempt %d began is recorded", self.name, number)

    def write_latest(self, checkpoint: CheckpointId) -> None:
        """Write ``latest``, which names the newest checkpoint."""
        self.latest.write(checkpoint)

    def note_damaged(self, commit: Commit, why: str) -> None:
        """Note that the copy here is damaged, for later listings of any process, unless that is known. The list is
        read first."""
        line = commit.lineage
        if not self.decided.read().is_damaged(line.checkpoint, line.attempt_id):
            self._decide(Word.DAMAGED, commit, why)

    def note_mended(self, commit: Commit) -> None:
        """Note that the copy here is whole: it was written anew, or read whole. Nothing is written if no listing, and
        no reader of this process, has found it damaged."""
        line = commit.lineage
        if self.decided.known.is_damaged(line.checkpoint, line.attempt_id):
            self._decide(Word.MENDED, commit, "it was written again, or read whole")

    def _decide(self, word: Word, commit: Commit, reason: str) -> None:
        line = commit.lineage
        entry = self.decided.known.next(word, line.checkpoint, line.attempt_id)
        self.decided.add(entry, reason=reason)

    # The fence -----------------------------------------------------------------------------------

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """Raise FencedError if ``attempt`` must not delete or decide anything here; see ``Fence.check_newest``."""
        self.fence.check_newest(attempt, doing=doing)

    def check_begin(self, attempt: Attempt) -> None:
        """Raise FencedError if ``attempt`` must not begin a copy here; see ``Fence.check_begin``."""
        self.fence.check_begin(attempt)

    # Deletion ------------------------------------------------------------------------------------

    def delete(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        known: DecidedList | None,
        next_latest: CheckpointId | None = None,
    ) -> DecidedList | None:
        """Delete a checkpoint, the commit record first.

        ``known`` are the entries that the decision took into account. If the list of this tier has any other, nothing
        is deleted, and the list is returned: the caller decides again. Without ``known``, the checkpoint is deleted
        whatever is decided, because its commit was revoked.

        ``attempt`` is that of the process that asks, None for a person's command. Raises FencedError, and deletes
        nothing from then on, where a newer attempt exists: the fence is checked before each request that deletes.

        If ``latest`` names the checkpoint, it is rewritten to ``next_latest`` where that is committed, else deleted, as
        on a full tier. The checkpoint ceases to exist with the first deletion; a kill after that leaves an unfinished
        folder, which the next start collects. Files that tierfall did not write are kept.
        """
        if known is not None:
            decided = self.decided.read()
            if (decided - known).of_all_tiers:
                return decided
        doing = f"drop of {checkpoint}"
        if self.latest.read() == checkpoint:
            has_next = next_latest is not None and self.is_committed(next_latest)
            self.check_newest(attempt, doing=doing)
            if next_latest is None or not has_next:
                self.latest.delete()
            else:
                self.latest.write_or_delete(next_latest)
        if known is not None:
            self._record_lineage_of(checkpoint)
        self.check_newest(attempt, doing=doing)
        if known is not None:  # the requests until here may have taken long
            decided = self.decided.read(max_age_s=FENCE_VALID_S)
            if (decided - known).of_all_tiers:
                return decided
        self._synced.discard(checkpoint)
        self._cache.pop(checkpoint, None)
        self.backend.delete(keys.step_prefix(self._run, checkpoint) + keys.COMMIT_NAME)
        self.discard(checkpoint, attempt=attempt)
        return None

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Delete an uncommitted step folder, or one shard's files in it. The files of active writers are kept then, as
        other ranks may be writing there. ``attempt`` and FencedError are as in ``delete``."""

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of what is left of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        found = [f.key for f in self.files(checkpoint) if keys.is_tierfall_name(f.key)]
        selected = [name for name in found if shard is None or keys.parse_shard(name) == shard]
        delete_all(self.backend, [prefix + name for name in selected], before=check)
        if shard is None:
            check()
            self.backend.discard_unfinished(prefix)

    def delete_other_codecs(self, commit: Commit, *, attempt: Attempt) -> None:
        """Delete the files of images that were stored with another codec before. Raises FencedError."""
        checkpoint = commit.lineage.checkpoint

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of older files of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        kept = {file.name for file in commit.files}
        shards = {keys.parse_shard(name) for name in kept} - {None}
        names = [file.key for file in self.files(checkpoint)]
        others = [n for n in names if n not in kept and keys.parse_shard(n) in shards]
        delete_all(self.backend, [prefix + name for name in others], before=check)

    def delete_run(self) -> None:
        """Delete all that tierfall has written of the run, for a person's command; what names a checkpoint goes first,
        the tier's id last."""
        prefix = f"{self._run}/"
        found = [stored.key.removeprefix(prefix) for stored in self.backend.scan(prefix)]
        own = sorted(filter(keys.is_run_file, found), key=_order_of_deletion)
        for _, names in groupby(own, _order_of_deletion):
            delete_all(self.backend, [prefix + name for name in names])
        if own:
            self.backend.discard_unfinished(prefix)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Delete what writers of earlier starts left unpublished; return how many. Raises FencedError where ``attempt``
        is not the newest: a newer one has active writers."""
        self.check_newest(attempt, doing="deletion of unfinished files")
        return self.backend.discard_unfinished(f"{self._run}/")

    def _record_lineage_of(self, checkpoint: CheckpointId) -> None:
        """Record how the attempt of a checkpoint began; the checkpoint may be its last."""
        if self._lineage.has(checkpoint.attempt):
            return
        try:
            commit = self._read_commit(checkpoint)
        except (KeyNotFoundError, IntegrityError, NotSupportedError):
            return  # an unreadable commit record does not say how the attempt began
        try:
            self._lineage.create(commit)
        except StorageFullError as error:  # the deletion frees space
            logger.warning(
                "%s: how attempt %d began is not recorded: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip


def _order_of_deletion(name: str) -> int:
    """Return when a file is deleted: first the files that name a checkpoint, then commit records, then the rest, last
    the tier record. After a kill, no file names a checkpoint that is gone, and no commit record lacks its files."""
    folder, _, leaf = name.rpartition("/")
    if name == keys.LATEST_NAME or folder == keys.LINEAGE_FOLDER:
        return 0
    return 1 if leaf == keys.COMMIT_NAME else 3 if name == keys.TIER_NAME else 2


def _found(
    checkpoint: CheckpointId, files: Mapping[str, StoredObject], commit: CommitResult
) -> FoundCopy:
    record = commit if isinstance(commit, Commit) else None
    listed = _bytes(files.values())
    return FoundCopy(
        id=checkpoint,
        state=CopyState.COMMITTED,
        bytes=record.stored_bytes if record and keys.COMMIT_NAME not in files else listed,
        commit=record,
        damage=commit if isinstance(commit, TierfallError) else None,
    )


def _suspects(commit: Commit, files: Mapping[str, StoredObject]) -> Sequence[str]:
    """Return the files that a listing shows as missing or of another size."""
    return [name for name, _ in wrong_files(commit, _sizes(files))]


def _sizes(files: Mapping[str, StoredObject]) -> dict[str, int]:
    return {name: stored.bytes for name, stored in files.items()}


def _bytes(files: Iterable[StoredObject]) -> int:
    return sum(file.bytes for file in files)


def _version(stored: StoredObject) -> tuple[int, str]:
    return stored.bytes, stored.version
