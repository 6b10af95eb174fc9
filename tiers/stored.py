"""A tier that keeps checkpoints in a backend: local NVMe, a parallel file system, an object store.

It knows the names and the order in which a checkpoint becomes real (image, manifest, commit record) and is taken apart
again (commit record first). It decides nothing, and it is handed its backend.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

from tierfall.core.format.catalog import FoundCopy, Listing, StepFolderError, start_of
from tierfall.core.format.commit_files import damage_mark, without_index, wrong_files
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Geometry,
    Mark,
    TierRecord,
    encode_start,
    read_attempt,
    read_commit,
    read_tier,
    stops_drop,
)
from tierfall.core.runtime.rate_limit import RateLimiter
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, StoredObject, delete_all
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    FencedError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    StorageFullError,
    TierfallError,
)
from tierfall.core.types.lineage import AttemptStart, Key
from tierfall.core.types.values import CheckpointId, Codec, CopyState, Shard
from tierfall.tiers.commit_records import CommitRecords, Found
from tierfall.tiers.documents import Documents
from tierfall.tiers.image_writer import PackCounts, PackedImageWriter, Packing, RawImageWriter
from tierfall.tiers.marks import Marks, marks_among

logger = logging.getLogger("tierfall")

FENCE_HOLDS_S = 1.0
"""How long a look at the attempts counts for a commit: whoever was stopped for longer in between looks again."""
Recognise = Callable[[str, Callable[[bytes], bool]], None]
REQUESTS_AT_ONCE_MIN = 32
REQUESTS_FOR_EACH = 4
"""So many small requests at a time for each large one that a backend takes, and REQUESTS_AT_ONCE_MIN at least."""


class StrayAttemptError(IntegrityError):
    """The record of an attempt that lies under the name of another: somebody put it there, no start did."""


class StoredTier:
    """One run's checkpoints on one tier. All methods block, and may be called from several threads."""

    def __init__(
        self,
        *,
        name: str,
        run: str,
        backend: Backend,
        packing: Packing | None = None,
        pace: RateLimiter | None = None,
        recognise: Recognise | None = None,
        links: Callable[[str], Iterable[str]] = lambda folder: (),
        read_only: str = "",
        heard_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """With ``packing``, images are stored packed; those that lie there otherwise are read as well. ``pace`` is what
        writes of ``backend`` keep to, where they keep to any. ``recognise`` tells a backend whose folder may be mounted
        anew by which object, and what it says, that is the same. ``links`` names the symbolic links in a folder of it,
        which a scan leaves out. ``read_only`` says why ``backend`` was opened for
        reading only, where it was; ``heard_s`` when the medium last answered, on the monotonic clock."""
        self.name = name
        self.read_only = read_only
        self.heard_s = heard_s
        self.backend = backend
        self._run = run
        self._packing = packing
        self._pace = pace
        self._at_most = None if pace is None else pace.bytes_per_second
        self._documents = Documents(name, backend)
        self._recognise = recognise
        self._links = links
        self._own_attempts: set[str] = set()
        self._settled: set[CheckpointId] = set()
        self._recorded: set[str] = set()
        """The attempts of this process whose records were seen here, whole, or that somebody vouches for."""
        self._strays: set[int] = set()
        self._recorded_starts: set[Key] = set()
        self._recorded_numbers: set[int] = set()
        self._parallel = max(REQUESTS_AT_ONCE_MIN, REQUESTS_FOR_EACH * backend.traits.max_parallel)
        self._commits = CommitRecords(self._read_commit, parallel=self._parallel)
        self._marks = Marks(run, backend, self._documents, parallel=self._parallel)

    @property
    def place(self) -> str:
        return self.backend.place

    def keep_to(self, bytes_per_s: float | None) -> None:
        """Be written at so many bytes of images a second from now on, and at no more than the pace was at first; None:
        at that alone."""
        if self._pace is None:
            return
        packed = self.packed
        if bytes_per_s is not None and packed is not None and packed.raw_bytes:
            bytes_per_s *= packed.packed_bytes / packed.raw_bytes
        bounds = [bound for bound in (bytes_per_s, self._at_most) if bound is not None]
        self._pace.change(min(bounds, default=None))

    # What is there -------------------------------------------------------------------------------

    def list(self) -> Listing:
        """Read all that this tier holds of the run, or report the error that kept it from answering."""
        try:
            return self._list()
        except TierfallError as error:
            return Listing(tier=self.name, error=error)

    def _list(self) -> Listing:
        self._marks.begin()  # before the listing: what changes later is noticed
        folders, attempts, starts = self._scan()
        records = self._commits.find(
            {
                checkpoint: files[keys.COMMIT_NAME]
                for checkpoint, files in folders.items()
                if keys.COMMIT_NAME in files
            }
        )
        copies = [
            self._with_damage(_found(checkpoint, folders[checkpoint], record), folders[checkpoint])
            for checkpoint, record in records.items()
            if record is not None
        ]
        if any(copy.commit is not None and copy.damage is not None for copy in copies):
            # the folder of what was committed during the scan may have been read in part: look once more
            again, _, _ = self._scan()
            copies = [self._with_damage(c, again[c.id]) for c in copies if c.id in again]
            folders = {**folders, **again}
        copies = [self._as_marked(copy, folders[copy.id]) for copy in copies]
        return Listing(
            tier=self.name,
            copies=tuple(sorted(copies, key=lambda c: c.id)),
            unfinished={
                checkpoint: _bytes(files.values())
                for checkpoint, files in folders.items()
                if keys.COMMIT_NAME not in files
            },
            attempts=attempts,
            starts=starts,
            damaged=tuple(self._no_folders([id for id, files in folders.items() if "" in files])),
        )

    def _no_folders(self, files: Iterable[CheckpointId]) -> Iterator[StepFolderError]:
        """Name what lies where folders of steps are to be: these files, and symbolic links, which a scan passes over
        and nobody follows."""
        advice = dict.fromkeys(files, "is a file where the folder of a step is to be: move it away")
        for name in self._links(self._run):
            if checkpoint := keys.parse_step_folder(name):
                advice[checkpoint] = (
                    "is a symbolic link where the folder of a step is to be, and none is followed below the tier's "
                    "folder, so that the step is not read: put the folder itself there, or remove the link"
                )
        for checkpoint, problem in sorted(advice.items()):
            where = f"{self._run}/{keys.step_folder(checkpoint)}"
            yield StepFolderError(f"{self.name}: {where} {problem}", checkpoint)

    def _scan(
        self,
    ) -> tuple[
        dict[CheckpointId, dict[str, StoredObject]], tuple[int, ...], tuple[AttemptStart, ...]
    ]:
        """Return the files of every step's folder, by their names in it; the numbers of the attempts; and how those
        began that have committed something here."""
        folders: dict[CheckpointId, dict[str, StoredObject]] = {}
        attempts: list[int] = []
        starts: list[AttemptStart] = []
        for stored in self.backend.scan(f"{self._run}/"):
            folder, _, rest = stored.key.removeprefix(f"{self._run}/").partition("/")
            if folder == keys.ATTEMPTS_FOLDER and (number := keys.parse_attempt(rest)):
                attempts.append(number)
            elif folder == keys.LINEAGE_FOLDER and (start := _start(rest)):
                starts.append(start)
                self._note_recorded(start.key)
            elif checkpoint := keys.parse_step_folder(folder):
                folders.setdefault(checkpoint, {})[rest] = stored
        return folders, tuple(sorted(attempts)), tuple(starts)

    def _with_damage(self, copy: FoundCopy, files: Mapping[str, StoredObject]) -> FoundCopy:
        """Hold the files of a checkpoint's folder, by name and size, against its commit record: what lacks one that the
        record names is damaged, whoever took it. The index is made of the manifests: a copy is whole without it."""
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

    def _as_marked(self, copy: FoundCopy, files: Iterable[str]) -> FoundCopy:
        """Report a copy as damaged that an earlier reader, of this process or another, has found so."""
        if copy.commit is None or copy.damage is not None:
            return copy
        why = self._marks.damage_of(copy.commit, files)
        return copy if why is None else replace(copy, damage=IntegrityError(f"{self.name}: {why}"))

    def read_commit(self, checkpoint: CheckpointId) -> Commit:
        return self._read_commit(checkpoint, None)

    def _read_commit(self, checkpoint: CheckpointId, bytes_known: int | None) -> Commit:
        key = self._key(checkpoint, keys.COMMIT_NAME)
        data = self._documents.read(key, bytes_known=bytes_known)
        commit = read_commit(data, what=self._documents.what(key))
        if commit.line.checkpoint != checkpoint or commit.line.run != self._run:
            raise IntegrityError(
                f"{self._documents.what(key)}: speaks of {commit.line.run} {commit.line.checkpoint}: "
                "it was moved here from elsewhere"
            )
        return commit

    def holds(self, checkpoint: CheckpointId) -> bool:
        """Say whether a checkpoint is committed here."""
        return self._is_there(self._key(checkpoint, keys.COMMIT_NAME))

    def _is_there(self, key: str) -> bool:
        try:
            self.backend.stat(key)
        except KeyNotFoundError:
            return False
        return True

    def look(self, checkpoint: CheckpointId) -> FoundCopy | None:
        """Look at one committed copy as ``list`` looks at all; None where it has no commit record."""
        copy = self._look(checkpoint)
        if copy is None or copy.damage is not None:  # it may just be written: look once more
            copy = self._look(checkpoint)
        return copy

    def _look(self, checkpoint: CheckpointId) -> FoundCopy | None:
        prefix = keys.step_prefix(self._run, checkpoint)
        files = {s.key.removeprefix(prefix): s for s in self.backend.scan(prefix)}
        listed = files.get(keys.COMMIT_NAME)
        record = None if listed is None else self._commits.find_one(checkpoint, listed)
        if record is None:
            return None
        return self._as_marked(self._with_damage(_found(checkpoint, files, record), files), files)

    def settle(self, checkpoint: CheckpointId) -> None:
        """Make the commit record that was found here durable, once: whoever wrote it may have failed, or died, between
        making it visible and its last fsync. It costs an fsync of the step's folder, and nothing on an object store.

        Raises BackendError where it may not survive a power cut: then nothing may rely on this copy.
        """
        if checkpoint not in self._settled:
            self._documents.settle(self._key(checkpoint, keys.COMMIT_NAME))
            self._settled.add(checkpoint)

    def read_manifest(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        return self._documents.read(self._key(checkpoint, keys.manifest_name(shard)))

    def read_index(self, checkpoint: CheckpointId) -> bytes:
        """Read the merged index of several ranks."""
        return self._documents.read(self._key(checkpoint, keys.INDEX_NAME))

    def read_stored(self, checkpoint: CheckpointId, shard: Shard) -> bytes:
        """Read the record of how a packed image lies in its file."""
        return self._documents.read(self._key(checkpoint, keys.stored_name(shard)))

    def read_into(
        self,
        checkpoint: CheckpointId,
        shard: Shard,
        offset: int,
        view: memoryview,
        *,
        codec: Codec = Codec.NONE,
    ) -> None:
        """Fill ``view`` with bytes of the file of a shard's image, as ``codec`` has packed it, from ``offset``."""
        self.backend.read_into(self._key(checkpoint, keys.shard_name(shard, codec)), offset, view)

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
        """As ``read_into``, into one view after the other, of what is in the page cache; False, with nothing read,
        where it is not."""
        key = self._key(checkpoint, keys.shard_name(shard, codec))
        return self.backend.read_cached(key, offset, end, views)

    def files(self, checkpoint: CheckpointId) -> tuple[StoredObject, ...]:
        """Everything in the step's folder, names relative to it."""
        prefix = keys.step_prefix(self._run, checkpoint)
        return tuple(
            StoredObject(key=stored.key.removeprefix(prefix), bytes=stored.bytes)
            for stored in self.backend.scan(prefix)
        )

    # Becoming real -------------------------------------------------------------------------------

    @property
    def packs(self) -> bool:
        return self._packing is not None

    @property
    def packed(self) -> PackCounts | None:
        """What was packed so far; None where images are stored as they are."""
        return None if self._packing is None else self._packing.counts

    def create_shard(
        self, checkpoint: CheckpointId, shard: Shard, cut: Geometry, pieces: Spliced
    ) -> RawImageWriter | PackedImageWriter:
        """Begin a shard's image, cut and filled as ``cut`` and ``pieces`` say."""
        packing = self._packing
        if packing is None:
            key = self._key(checkpoint, keys.shard_name(shard))
            return RawImageWriter(self.backend.create(key, length=cut.image_bytes))
        key = self._key(checkpoint, keys.shard_name(shard, packing.codec))
        record = self._key(checkpoint, keys.stored_name(shard))
        return PackedImageWriter(
            lambda bound: self.backend.create(key, length_max=bound),
            packing,
            shard=shard,
            cut=cut,
            pieces=pieces,
            part_bytes_min=self.backend.traits.part_bytes_min,
            write_record=lambda data: self._documents.replace(record, data),
        )

    def write_manifest(self, checkpoint: CheckpointId, shard: Shard, data: bytes) -> None:
        self._documents.replace(self._key(checkpoint, keys.manifest_name(shard)), data)

    def write_index(self, checkpoint: CheckpointId, data: bytes) -> None:
        self._documents.replace(self._key(checkpoint, keys.INDEX_NAME), data)

    def commit(
        self,
        commit: Commit,
        *,
        attempt: Attempt,
        marks: Iterable[Mark] = (),
        repairs: bool = False,
    ) -> None:
        """Make a checkpoint exist here, unless a newer attempt than the writer's own does.

        Called again for the same checkpoint (after a lost reply, or by the next start) it succeeds. Raises FencedError,
        and IntegrityError where another checkpoint of that name was committed: it is never overwritten. ``repairs``:
        what is there is known to be this very checkpoint, damaged; its record is replaced, and other forms of it go.
        """
        began_s = time.monotonic()
        self.check_fence(attempt)
        checkpoint = commit.line.checkpoint
        for mark in marks:
            self._marks.create(mark)
        if repairs:
            self._documents.replace(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
            self._settled.add(checkpoint)
            self.forget_damage(checkpoint)
            self.remove_other_forms(commit, attempt=attempt)
            return
        try:
            self._documents.create(self._key(checkpoint, keys.COMMIT_NAME), commit.encode())
        except KeyExistsError:
            there = self.read_commit(checkpoint)
            # an index says nothing of its own: it may have been left out by one of two tries
            if (
                without_index(there).files != without_index(commit).files
                or there.line != commit.line
            ):
                raise IntegrityError(
                    f"commit on {self.name}: {checkpoint} was committed before with other content; "
                    "it is left as it is"
                ) from None
            self.settle(checkpoint)
        else:
            self._settled.add(checkpoint)
        # a newer start may have collected what the record names
        if time.monotonic() - began_s > FENCE_HOLDS_S:
            self.check_fence(attempt)
        try:
            self.record_start(commit, attempt)
        except BackendError as error:  # whoever drops the attempt's checkpoints records it before
            logger.warning(
                "%s: how attempt %d began is not recorded yet: %s",
                self.name, commit.line.checkpoint.attempt, error,
            )  # fmt: skip

    def remove_other_forms(self, commit: Commit, *, attempt: Attempt) -> None:
        """Remove what images left in the folder of a step where they were packed otherwise before. Raises FencedError
        as ``drop`` does."""

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of older files of {commit.line.checkpoint}")

        prefix = keys.step_prefix(self._run, commit.line.checkpoint)
        kept = {file.name for file in commit.files}
        shards = {keys.parse_shard(name) for name in kept} - {None}
        there = [stored.key for stored in self.files(commit.line.checkpoint)]
        others = [n for n in there if n not in kept and keys.parse_shard(n) in shards]
        delete_all(self.backend, [prefix + name for name in others], before=check)

    def name_latest(self, checkpoint: CheckpointId) -> None:
        """Leave the hint for people; the truth is the commit records."""
        text = f"{keys.step_folder(checkpoint)}\n".encode()
        self._documents.replace(f"{self._run}/{keys.LATEST_NAME}", text)

    def read_latest(self) -> CheckpointId | None:
        try:
            text = self._documents.read(f"{self._run}/{keys.LATEST_NAME}")
        except KeyNotFoundError:
            return None
        return keys.parse_step_folder(text.decode("ascii", "replace").strip())

    def forget_latest(self) -> None:
        self.backend.delete(f"{self._run}/{keys.LATEST_NAME}")

    # Which tier it is ----------------------------------------------------------------------------

    def read_tier(self) -> TierRecord | None:
        """Read which tier this is; None where nothing says so yet."""
        key = f"{self._run}/{keys.TIER_NAME}"
        try:
            return read_tier(self._documents.read(key), what=self._documents.what(key))
        except KeyNotFoundError:
            return None

    def write_tier(self, record: TierRecord, *, again: bool = False) -> TierRecord:
        """Say which tier this is, or read what it says already; ``again``: in the place of that."""
        key = f"{self._run}/{keys.TIER_NAME}"
        try:
            (self._documents.replace if again else self._documents.create)(key, record.encode())
        except KeyExistsError as error:
            what = self._documents.what(key)
            try:
                return read_tier(self._documents.read(key), what=what)
            except KeyNotFoundError:
                raise AccessDeniedError(
                    f"{what} is no file, and the record that tells this tier from others is to be there: move away "
                    f"what lies there in {self.place}"
                ) from error
        return record

    def is_known_by(self, id: str) -> None:
        """Go on with a folder that is mounted anew where it says that it is this tier."""
        key = f"{self._run}/{keys.TIER_NAME}"
        if self._recognise is not None:
            self._recognise(
                key, lambda data: read_tier(data, what=self._documents.what(key)).id == id
            )

    def is_seen_by(self, other: StoredTier) -> bool:
        """Say whether what is written here lies there, too: two that say the same of themselves may be copies."""
        key = f"{self._run}/{keys.PROBE_FOLDER}/{int(time.time())}-{secrets.token_hex(8)}"
        self._documents.replace(key, b"\n")
        try:
            other.backend.stat(key)
        except KeyNotFoundError:
            return False
        finally:
            self.backend.delete(key)
        return True

    # Attempts ------------------------------------------------------------------------------------

    def record_start(self, commit: Commit, writer: Attempt | None = None) -> None:
        """Record how the attempt of a checkpoint that is committed, here or on another tier, began, once: what it left
        behind stays so when its last checkpoint is gone. The record comes after the commit record, never before it: a
        start that died before its first commit leaves nothing behind."""
        line = commit.line
        number = line.checkpoint.attempt
        if (number, line.attempt_id) in self._recorded_starts:
            return
        began_s = commit.wall_time_s
        if writer is None or writer.id != line.attempt_id:
            with suppress(KeyNotFoundError, IntegrityError, NotSupportedError):
                writer = self.read_attempt(number)
        if writer is not None and writer.id == line.attempt_id:
            began_s = writer.wall_time_s
        began_ms = max(0, int(began_s * 1000))
        start = replace(start_of(commit), began_s=began_ms / 1000)
        name = keys.start_name(
            number, line.attempt_id, began_ms=began_ms, started_from=line.started_from
        )
        if _start(name) == start:  # else it is of no attempt that tierfall makes
            with suppress(KeyExistsError):
                key = f"{self._run}/{keys.LINEAGE_FOLDER}/{name}"
                self._documents.create(key, encode_start(self._run, start))
        self._note_recorded((number, line.attempt_id))

    def _note_recorded(self, key: Key) -> None:
        self._recorded_starts.add(key)
        self._recorded_numbers.add(key[0])

    def attempts(self) -> tuple[int, ...]:
        prefix = f"{self._run}/{keys.ATTEMPTS_FOLDER}/"
        numbers = (
            keys.parse_attempt(stored.key.removeprefix(prefix))
            for stored in self.backend.scan(prefix)
        )
        return tuple(sorted(number for number in numbers if number is not None))

    def read_attempt(self, number: int) -> Attempt:
        """Read an attempt's record. Raises IntegrityError where it is damaged; StrayAttemptError where it is whole, and
        another attempt's."""
        key = keys.attempt_key(self._run, number)
        what = self._documents.what(key)
        attempt = read_attempt(self._documents.read(key), what=what)
        if (attempt.run, attempt.number) != (self._run, number):
            raise StrayAttemptError(
                f"{what}: is the record of attempt {attempt.number} of run {attempt.run!r}, which somebody put there: "
                "remove it"
            )
        return attempt

    def take_attempt(self, attempt: Attempt) -> None:
        """Create the attempt's record; raises KeyExistsError where another process took the number."""
        key = keys.attempt_key(self._run, attempt.number)
        self._own_attempts.add(attempt.id)  # first: a commit under way may see the record at once
        try:
            self._documents.create(key, attempt.encode())
            known = self.backend.traits.conditional_create or self._is_of(attempt)
        except KeyExistsError:
            if not self._is_of(attempt):
                raise
            self._documents.settle(key)
            known = True
        if not known:  # the other one wrote last
            raise KeyExistsError(
                f"{self._documents.what(key)}: another process took it at the same moment"
            )
        self._recorded.add(attempt.id)

    def _is_of(self, attempt: Attempt) -> bool:
        """Say whether what lies under an attempt's name is its record: a damaged one is nobody's to take."""
        try:
            return self.read_attempt(attempt.number).id == attempt.id
        except (IntegrityError, KeyNotFoundError) as error:
            logger.warning("%s; that number is not taken", error)
            return False

    def vouch_for(self, attempt: Attempt) -> None:
        """Have the record of an attempt written anew before the next commit, where it is damaged. Whoever calls this
        knows that the number is that attempt's."""
        self._recorded.add(attempt.id)

    def check_fence(self, attempt: Attempt) -> None:
        """Raise FencedError if a newer attempt than ``attempt`` exists here, or its number has another owner.

        A newer attempt of this process (it went back to an older step) is no other's. A record of a newer one that is
        damaged raises IntegrityError: a newer start may be alive. Strays count for nothing. The record of ``attempt``
        itself is written anew where it is damaged and this process has seen it whole.
        """
        if self._is_registered(attempt, doing="commit"):
            return
        try:
            self.take_attempt(attempt)  # a tier that could not be reached at open
        except KeyExistsError as error:
            raise FencedError(
                f"commit on {self.name}: attempt {attempt.number} of run {attempt.run!r} was taken by another "
                "process just now: this process must stop; nothing it writes counts any more"
            ) from error

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """Raise FencedError as ``check_fence`` does, before ``attempt`` deletes something here or changes a mark.

        No record is left for an attempt that has none here: a full tier is emptied by deletions. None stands for a
        person, who takes no attempt and is never fenced.
        """
        if attempt is not None:
            self._is_registered(attempt, doing=doing)

    def check_begin(self, attempt: Attempt) -> None:
        """Raise FencedError as ``check_fence`` does, before ``attempt`` begins a copy here.

        To begin one changes nothing that lies here, so the attempts are listed only where the record of this one has
        not been seen, or where the next number is taken, as a newer start does. The commit lists them.
        """
        if attempt.id not in self._recorded or self._is_followed(attempt):
            self.check_fence(attempt)

    def check_publish(self, checkpoint: CheckpointId, shard: Shard, *, attempt: Attempt) -> None:
        """Raise FencedError as ``check_newest`` does, before ``attempt`` publishes the files of a shard, where that
        replaces one: it may be of a copy that a newer attempt has made, packed otherwise.

        Where none of them is here and nobody has the next number, the attempts are not listed: the commit does that.
        """
        codec = Codec.NONE if self._packing is None else self._packing.codec
        files = [keys.shard_name(shard, codec), keys.manifest_name(shard)]
        if self._packing is not None:
            files.append(keys.stored_name(shard))
        replaces = any(self._is_there(self._key(checkpoint, name)) for name in files)
        if replaces or self._is_followed(attempt):
            self.check_newest(attempt, doing=f"flush of {checkpoint}")

    def _is_followed(self, attempt: Attempt) -> bool:
        """Say whether somebody has the number after an attempt's: a start that sees this tier takes that one. One that
        has come since is found by less than a listing; that nobody has it proves nothing."""
        return self._is_there(keys.attempt_key(self._run, attempt.number + 1))

    def _is_registered(self, attempt: Attempt, *, doing: str) -> bool:
        """Say whether an attempt, or a newer one of this process, has its record here. Raises FencedError where another
        process has a newer one, or this number."""
        holder: Attempt | TierfallError | None
        try:
            holder = self.read_attempt(attempt.number)
        except KeyNotFoundError:
            holder = None
        except TierfallError as error:
            holder = error
        numbers = self.attempts()  # last: the less time goes by before what follows, the better
        newer = self._newest_above(attempt.number, numbers)
        if newer is not None:
            if newer.id in self._own_attempts:
                return True
            raise FencedError(
                f"{doing} on {self.name}: attempt {attempt.number} of run {attempt.run!r} was followed by attempt "
                f"{newer.number} (process {newer.pid} on {newer.node}): this process must stop; nothing it "
                "writes counts any more. If that process only reads, an evaluation say, it is to use tierfall.load, "
                "which takes no attempt"
            )
        if holder is not None:
            self._check_owner(attempt, holder, doing=doing)
        return holder is not None

    def _newest_above(self, number: int, numbers: Iterable[int]) -> Attempt | None:
        for newer in reversed([n for n in numbers if n > number]):
            try:
                return self.read_attempt(newer)
            except StrayAttemptError as error:
                if newer not in self._strays:
                    logger.warning("%s; until then it is ignored", error)
                self._strays.add(newer)
            except KeyNotFoundError:
                continue  # it was removed since the listing
            except IntegrityError as error:
                raise IntegrityError(
                    f"{error}: it may be a newer start's, which nobody must commit beside. If no newer start of run "
                    f"{self._run!r} is alive, remove that file: then this one goes on"
                ) from error
        return None

    def _check_owner(
        self, attempt: Attempt, holder: Attempt | TierfallError, *, doing: str
    ) -> None:
        if isinstance(holder, IntegrityError):
            if attempt.id in self._recorded:
                key = keys.attempt_key(self._run, attempt.number)
                self._documents.replace(key, attempt.encode())
                logger.warning("%s; it was written anew", holder)
                return
            raise IntegrityError(
                f"{holder}: it may be another start's, which nobody must commit beside. If no other start of run "
                f"{self._run!r} is alive, remove that file: then this one goes on"
            ) from holder
        if isinstance(holder, TierfallError):
            raise holder
        if holder.id != attempt.id:
            raise FencedError(
                f"{doing} on {self.name}: attempt {attempt.number} of run {attempt.run!r} belongs to process "
                f"{holder.pid} on {holder.node}: this process must stop; nothing it writes counts any more"
            )
        self._recorded.add(attempt.id)

    # Marks ---------------------------------------------------------------------------------------

    def add_mark(self, mark: Mark) -> None:
        """Leave a person's mark beside a checkpoint; whoever else has the run open is to read it."""
        self._marks.add(mark)

    def remove_mark(self, checkpoint: CheckpointId, name: str) -> None:
        """Take a mark away, as ``add_mark`` leaves it."""
        self._marks.remove(checkpoint, name)

    def read_mark(self, checkpoint: CheckpointId, name: str) -> Mark:
        return self._marks.read(checkpoint, name)

    def marks(self, checkpoint: CheckpointId) -> frozenset[str]:
        """Names of the marks beside a checkpoint, read afresh."""
        return self._marks.of(checkpoint)

    def read_marks(self, checkpoints: Iterable[CheckpointId]) -> dict[CheckpointId, frozenset[str]]:
        """Names of the marks beside these checkpoints, read afresh; of all that lie here, where a person has left or
        taken away any since they were last read."""
        return self._marks.of_many(checkpoints)

    def note_damage(self, commit: Commit, why: str, *, wall_time_s: float) -> None:
        """Record beside a copy that a reader found it damaged, so that later listings report it.

        Raises KeyNotFoundError, with nothing left behind, where the copy has been dropped.
        """
        name = damage_mark(commit.line)
        id = commit.line.checkpoint
        self.add_mark(Mark(name=name, checkpoint=id, wall_time_s=wall_time_s, reason=why))
        try:
            self.read_commit(id)
        except KeyNotFoundError:
            self.remove_mark(id, name)
            raise

    def forget_damage(self, checkpoint: CheckpointId) -> None:
        """Remove what was recorded of damage: the copy was written anew, or all of it was read and is good."""
        self._marks.forget_damage(checkpoint)

    # Going ---------------------------------------------------------------------------------------

    def drop(
        self,
        checkpoint: CheckpointId,
        *,
        attempt: Attempt | None,
        tombstoned: bool = False,
        next_latest: CheckpointId | None = None,
        void: bool = False,
    ) -> frozenset[str]:
        """Take a checkpoint apart, the commit record first, unless its marks stop that (``stops_drop``); return them.
        Nothing stops it where it is ``void``: a record that was taken back, of what is no checkpoint here.

        ``attempt`` is that of the process that asks for it, None where a person does. Raises FencedError, with nothing
        deleted from then on, where a newer attempt exists: it is looked for before each request that deletes.

        Where ``latest`` named it, it comes to name ``next_latest`` if that is still there, or goes; where there is no
        room to write it, it goes first, and is written once the rest is gone. From the first
        deletion on the checkpoint does not exist; a kill in between leaves an unfinished folder, which the next start
        collects. Files that tierfall did not write stay where they are.
        """
        marks = frozenset() if void else self.marks(checkpoint)
        if stops_drop(marks, tombstoned=tombstoned):
            return marks
        doing = f"drop of {checkpoint}"
        unnamed = None
        if self.read_latest() == checkpoint:
            is_there = next_latest is not None and self.holds(next_latest)
            self.check_newest(attempt, doing=doing)
            if next_latest is not None and is_there:
                unnamed = self._name_latest_or_forget(next_latest)
            else:
                self.forget_latest()
        if not void:
            self._keep_start(checkpoint)
        self.check_newest(attempt, doing=doing)
        self._settled.discard(checkpoint)
        self._commits.forget(checkpoint)
        self.backend.delete(self._key(checkpoint, keys.COMMIT_NAME))
        self.discard(checkpoint, attempt=attempt)
        if unnamed is not None:
            self._name_latest_again(unnamed)
        return marks

    def _name_latest_or_forget(self, checkpoint: CheckpointId) -> CheckpointId | None:
        """Name ``latest``. Where there is no room for that, it goes, and what it is to name is returned: a hint keeps
        nothing from being dropped, which alone makes room on a full tier."""
        try:
            self.name_latest(checkpoint)
        except StorageFullError:
            self.forget_latest()
            return checkpoint
        return None

    def _name_latest_again(self, checkpoint: CheckpointId) -> None:
        """Name ``latest`` after it had to go, unless somebody else named it meanwhile."""
        try:
            if self.read_latest() is None and self.holds(checkpoint):
                self.name_latest(checkpoint)
        except BackendError as error:
            logger.warning(
                "%s: 'latest' is missing until the next commit there: it could not be written: %s",
                self.name, error,
            )  # fmt: skip

    def _keep_start(self, checkpoint: CheckpointId) -> None:
        """Record how the attempt of a checkpoint began before it goes, which may be the attempt's last."""
        if checkpoint.attempt in self._recorded_numbers:
            return
        try:
            commit = self.read_commit(checkpoint)
        except (KeyNotFoundError, IntegrityError, NotSupportedError):
            return  # it leaves nothing behind: what cannot be read says of no attempt how it began
        try:
            self.record_start(commit)
        except StorageFullError as error:  # what is dropped makes room
            logger.warning(
                "%s: how attempt %d began is not recorded: %s",
                self.name, checkpoint.attempt, error,
            )  # fmt: skip

    def discard(
        self, checkpoint: CheckpointId, shard: Shard | None = None, *, attempt: Attempt | None
    ) -> None:
        """Remove what is left in the folder of a step that is not committed: all, or one shard's files. Those whose
        writers live stay then, as other ranks may be at work there; the marks of a commit that failed go with the last
        of the images. ``attempt`` and FencedError are as in ``drop``: a newer attempt may be filling this folder."""

        def check() -> None:
            self.check_newest(attempt, doing=f"deletion of what is left of {checkpoint}")

        prefix = keys.step_prefix(self._run, checkpoint)
        found = [stored.key.removeprefix(prefix) for stored in self.backend.scan(prefix)]
        found = [name for name in found if keys.is_ours(name)]
        going = [name for name in found if shard is None or keys.belongs_to(name, shard)]
        others = set(found) - set(going)
        if all(name.startswith(f"{keys.MARKS_FOLDER}/") for name in others):
            going += others
        delete_all(self.backend, [prefix + name for name in going], before=check)
        if shard is None:
            check()
            self.backend.discard_unfinished(prefix)

    def discard_unfinished(self, *, attempt: Attempt) -> int:
        """Remove what writers of earlier starts left behind. Raises FencedError where ``attempt`` is not the newest:
        the writers of a newer one live."""
        self.check_newest(attempt, doing="deletion of unfinished files")
        return self.backend.discard_unfinished(f"{self._run}/")

    def close(self) -> None:
        self.backend.close()

    # Keys ----------------------------------------------------------------------------------------

    def _key(self, checkpoint: CheckpointId, name: str) -> str:
        return keys.step_prefix(self._run, checkpoint) + name


def _start(name: str) -> AttemptStart | None:
    """Read how an attempt began from the name of its record."""
    parsed = keys.parse_start(name)
    if parsed is None:
        return None
    number, attempt_id, began_ms, started_from = parsed
    return AttemptStart(
        attempt=number,
        attempt_id=attempt_id,
        started_from=started_from,
        began_s=began_ms / 1000,
    )


def _found(checkpoint: CheckpointId, files: dict[str, StoredObject], record: Found) -> FoundCopy:
    return FoundCopy(
        id=checkpoint,
        state=CopyState.COMMITTED,
        bytes=_bytes(files.values()),
        commit=record if isinstance(record, Commit) else None,
        damage=record if isinstance(record, TierfallError) else None,
        marks=marks_among(files),
    )


def _bytes(files: Iterable[StoredObject]) -> int:
    return sum(file.bytes for file in files)
