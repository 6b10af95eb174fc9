"""The small files of a run on one tier, each read whole and published whole: the tier record, which identifies the
tier; ``latest``, which names the newest checkpoint; the list of what is decided; the records of attempts, with the
fence that stops a process once a newer attempt exists; and the lineage records, which keep how an attempt began.

An attempt's record is created under its number, conditionally where the backend can, so that two processes never share
a number.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import cast

from tierfall.core.format.catalog import start_of
from tierfall.core.format.decided import Decided, DecidedList
from tierfall.core.format.documents import MAX_DOCUMENT_BYTES, JsonFields, open_sealed, read_twice
from tierfall.core.format.records import (
    Attempt,
    Commit,
    TierRecord,
    encode_start,
    parse_attempt_record,
    parse_tier_record,
)
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend, Publish, SyncedBackend, put_object
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
    UnreachableError,
)
from tierfall.core.types.lineage import Key
from tierfall.core.types.text import without_secrets
from tierfall.core.types.values import CheckpointId

logger = logging.getLogger("tierfall")

SetIdentityCheck = Callable[[str, Callable[[bytes], bool]], None]


class Documents:
    """The documents of one run on one tier; errors name the ``tier``. May be used by several threads."""

    def __init__(self, tier: str, run: str, backend: Backend) -> None:
        self.tier = tier
        self.run = run
        self.backend = backend
        self._maybe_unsynced: set[str] = set()
        """Keys that this process may have made visible without making them durable."""

    def what(self, key: str) -> str:
        """Name a document for error messages."""
        return f"{self.tier}: {key}"

    def exists(self, key: str) -> bool:
        try:
            self.backend.stat(key)
        except KeyNotFoundError:
            return False
        return True

    def read(self, key: str, *, bytes_known: int | None = None) -> bytes:
        """Read a document; raises IntegrityError where it is longer than MAX_DOCUMENT_BYTES. ``bytes_known``: its
        length by a listing, which saves the request for it."""
        length = self.backend.stat(key).bytes if bytes_known is None else bytes_known
        if length > MAX_DOCUMENT_BYTES:
            raise IntegrityError(f"{self.what(key)}: {length} bytes are too many")
        data = bytearray(length)
        if data or bytes_known is not None:
            self.backend.read_into(key, 0, memoryview(data))
        return bytes(data)

    def create(self, key: str, data: bytes) -> None:
        """Create a document; raises KeyExistsError where the key is taken: a caller compares the document with its own,
        since a try whose answer was lost may have created it.

        On a backend without conditional create, a stat comes first: it finds an earlier document, but not one that
        another process writes at the same moment.
        """
        if self.backend.traits.conditional_create:
            self._write(key, data, Publish.IF_ABSENT)
            return
        if self.exists(key):
            raise KeyExistsError(f"{self.what(key)}: it is there already")
        self.replace(key, data)

    def replace(self, key: str, data: bytes) -> None:
        """Write a document, in place of an existing one of that key."""
        self._write(key, data, Publish.REPLACE)

    def sync(self, key: str) -> None:
        """Make an existing document durable: its writer may have failed, or died, before the last fsync. Does nothing
        on a backend where every visible object is durable.

        Raises KeyNotFoundError where the document was deleted, and another BackendError where it may not survive a
        power cut. After a failed fsync a later one may report success wrongly, so the document is rewritten then; it
        raises IntegrityError, and rewrites nothing, if the document reads as damaged twice.
        """
        if not self.backend.traits.needs_sync:
            return
        if key in self._maybe_unsynced:
            self.replace(key, read_twice(lambda: self._read_intact(key)))
            return
        try:
            cast(SyncedBackend, self.backend).sync(key.rpartition("/")[0])
        except KeyNotFoundError:
            raise
        except BackendError:
            self._maybe_unsynced.add(key)
            raise

    def _read_intact(self, key: str) -> bytes:
        data = self.read(key)
        open_sealed(data, what=self.what(key))
        return data

    def _write(self, key: str, data: bytes, publish: Publish) -> None:
        try:
            put_object(self.backend, key, data, publish)
        except KeyExistsError:
            raise
        except BackendError:
            if self.backend.traits.needs_sync:
                self._maybe_unsynced.add(key)
            raise
        self._maybe_unsynced.discard(key)


class ContradictionError(UnreachableError):
    """A listing shows a key, and the store answers that it is absent: what is there could not be read."""


class TierRecordFile:
    """The tier record of one run on one tier; ``last`` is the one that was read or written last. ``out_of_reach``: why
    another file there could not be reached when the tier was listed last, else None."""

    def __init__(
        self,
        documents: Documents,
        set_identity_check: SetIdentityCheck | None,
        last: TierRecord | None,
    ) -> None:
        self._documents = documents
        self._set_identity_check = set_identity_check
        self._key = f"{documents.run}/{keys.TIER_NAME}"
        self.last = last
        self.out_of_reach: UnreachableError | None = None

    def read(self) -> TierRecord | None:
        """Read the tier record; None where there is none yet."""
        try:
            try:
                self.last = self._read_once()
            except IntegrityError:  # another rank may have replaced it since the stat
                self.last = read_twice(self._read_once)
        except KeyNotFoundError:
            return None
        return self.last

    def confirm_absence(self, error: KeyNotFoundError, key: str | None = None) -> None:
        """Raise UnreachableError if the tier record cannot be read, or another file was out of reach: the answer that a
        key is absent (``error``) then says nothing of the tier. Raise ContradictionError if a listing of now shows
        ``key``. On a tier that never had a record, and whose listing shows none, the answer stands."""
        if self.out_of_reach is not None:
            raise UnreachableError(
                f"{error}; and not all of the tier is within reach, so it may be there: {self.out_of_reach}"
            ) from error
        known = self.last
        try:
            is_there = self.read() is not None or (known is None and not self._is_listed(self._key))
            why = "" if is_there else "it is not there either"
        except TierfallError as unread:
            why = str(unread)
        if why:
            raise UnreachableError(
                f"{error}; and {self._documents.what(self._key)}, which tells this tier from others, could not be "
                f"read: {why}"
            ) from error
        if key is not None and self._is_listed(key):
            raise ContradictionError(
                f"{error}; and the listing of {self._documents.tier} shows it: the store contradicts itself"
            ) from error

    def _is_listed(self, key: str) -> bool:
        folder = key.rpartition("/")[0]
        return any(stored.key == key for stored in self._documents.backend.scan(f"{folder}/"))

    def _read_once(self) -> TierRecord:
        return parse_tier_record(
            self._documents.read(self._key), what=self._documents.what(self._key)
        )

    def write(self, record: TierRecord, *, again: bool = False) -> TierRecord:
        """Create the tier record, or return the one that exists; ``again`` replaces it."""
        try:
            (self._documents.replace if again else self._documents.create)(
                self._key, record.encode()
            )
        except KeyExistsError as error:
            found = self.read()
            if found is None:
                raise AccessDeniedError(
                    f"{self._documents.what(self._key)} is no file, and the record that tells this tier from others is "
                    f"to be there: move away what is there in {self._documents.backend.place}"
                ) from error
            return found
        self.last = record
        return record

    def recreate(self) -> None:
        """Create the record again that was read or written last, where it was deleted. One that exists is kept: it may
        be of a start that found the tier empty."""
        if self.last is not None:
            with suppress(KeyExistsError):
                self._documents.create(self._key, self.last.encode())

    def expect(self, id: str) -> None:
        """Let a backend whose folder is mounted anew continue with a folder whose tier record has this id."""
        if self._set_identity_check is not None:
            what = self._documents.what(self._key)
            self._set_identity_check(
                self._key, lambda data: parse_tier_record(data, what=what).id == id
            )


class LatestHint:
    """The file ``latest``, which names the newest checkpoint, for people and for listings: what it names is asked for
    by key where a listing does not show it."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._key = f"{documents.run}/{keys.LATEST_NAME}"

    def write(self, checkpoint: CheckpointId) -> None:
        self._documents.replace(self._key, f"{keys.step_folder(checkpoint)}\n".encode())

    def read(self, listed_bytes: int | None = None) -> CheckpointId | None:
        """Read it; None where it is missing or names no checkpoint. ``listed_bytes`` is its size by a listing."""
        try:
            text = self._documents.read(self._key, bytes_known=listed_bytes)
            if not text.endswith(b"\n"):  # it was replaced since by a longer one
                text = self._documents.read(self._key)
        except KeyNotFoundError:
            return None
        return keys.parse_step_folder(text.decode("ascii", "replace").strip())

    def delete(self) -> None:
        self._documents.backend.delete(self._key)

    def write_or_delete(self, checkpoint: CheckpointId) -> None:
        """Write the hint; where the tier is full, delete it until the next commit. A hint must not block a deletion,
        which is what frees space on a full tier."""
        try:
            self.write(checkpoint)
        except StorageFullError:
            self.delete()
            logger.warning(
                "%s: 'latest' is missing until the next commit there", self._documents.tier
            )


class DecidedFolder:
    """The folder ``decided`` of a run on one tier: its list of what persons have decided and readers have found.

    An entry is created once, and goes only with the run. So what was read before still stands, whatever a listing
    leaves out. See ``core/format/decided.py``. May be used by several threads.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._prefix = f"{documents.run}/{keys.DECIDED_FOLDER}/"
        self._guard = threading.Lock()
        self._known = DecidedList()
        self._read_s = float("-inf")

    @property
    def known(self) -> DecidedList:
        """The list as it was read last, with what this process has added since."""
        with self._guard:
            return self._known

    def read(self, *, max_age_s: float = 0.0) -> DecidedList:
        """Read the list. The last listing serves if it is younger than ``max_age_s`` seconds. Raises BackendError."""
        began_s = time.monotonic()
        with self._guard:
            if began_s - self._read_s < max_age_s:
                return self._known
        found = self._documents.backend.scan(self._prefix)
        return self.note((stored.key.removeprefix(self._prefix) for stored in found), began_s)

    def note(self, names: Iterable[str], began_s: float) -> DecidedList:
        """Note the names in a listing that began at ``began_s`` on the monotonic clock; return the list."""
        found = DecidedList.parse(names)
        with self._guard:
            self._known |= found
            self._read_s = max(self._read_s, began_s)
            return self._known

    def add(self, entry: Decided, *, reason: str = "") -> None:
        """Create an entry, durable on return. One that is there already is what was asked for."""
        key = self._prefix + entry.name
        try:
            self._documents.create(key, entry.encode(reason, time.time()))
        except KeyExistsError:
            self._documents.sync(key)
        with self._guard:
            self._known |= DecidedList([entry])

    def reason(self, entry: Decided) -> str:
        """Read the reason that an entry gives; it counts even if that cannot be read."""
        key = self._prefix + entry.name
        what = self._documents.what(key)
        try:
            members = open_sealed(self._documents.read(key), what=what)
            return str(JsonFields(members, what).get("reason", str))
        except TierfallError:
            return f"its entry {keys.DECIDED_FOLDER}/{entry.name} cannot be read"


class StrayAttemptError(IntegrityError):
    """A record of another attempt, stored under this attempt's name: a person put it there."""


class Fence:
    """The attempts of one run on one tier. May be used by several threads. ``on_emptied`` is called where the record of
    an attempt of this process is gone."""

    def __init__(self, documents: Documents, on_emptied: Callable[[], None] = lambda: None) -> None:
        self._on_emptied = on_emptied
        self._tier = documents.tier
        self._run = documents.run
        self._backend = documents.backend
        self._documents = documents
        self._own: set[str] = set()
        """The ids of attempts of this process."""
        self._recorded: set[str] = set()
        """The ids of own attempts whose record was created or read whole here, or that ``trust`` was called with."""
        self._trusted: set[str] = set()
        """The ids of attempts that ``trust`` was called with: their record may never have been here."""
        self._strays: set[int] = set()
        """The attempt numbers of strays that were logged."""

    def numbers(self) -> tuple[int, ...]:
        """List the numbers of all attempts with a record, ascending."""
        prefix = f"{self._run}/{keys.ATTEMPTS_FOLDER}/"
        numbers = (
            keys.parse_attempt(stored.key.removeprefix(prefix))
            for stored in self._backend.scan(prefix)
        )
        return tuple(sorted(number for number in numbers if number is not None))

    def read(self, number: int) -> Attempt:
        """Read an attempt's record. Raises IntegrityError where it is damaged, StrayAttemptError where it is another
        attempt's."""
        key = keys.attempt_key(self._run, number)
        what = self._documents.what(key)
        attempt = read_twice(lambda: parse_attempt_record(self._documents.read(key), what=what))
        if (attempt.run, attempt.number) != (self._run, number):
            raise StrayAttemptError(
                f"{what}: is the record of attempt {attempt.number} of run {attempt.run!r}, stored under the wrong "
                "name: remove it"
            )
        return attempt

    def create(self, attempt: Attempt) -> None:
        """Create the attempt's record; raises KeyExistsError where another process has the number."""
        key = keys.attempt_key(self._run, attempt.number)
        self._own.add(attempt.id)  # before the record: a concurrent commit may see it at once
        try:
            self._documents.create(key, attempt.encode())
            is_ours = self._backend.traits.conditional_create or self._is_record_of(attempt)
        except KeyExistsError:
            if not self._is_record_of(attempt):
                raise
            self._documents.sync(key)
            is_ours = True
        if not is_ours:  # without a conditional create, the last writer has the number
            raise KeyExistsError(
                f"{self._documents.what(key)}: another process created it at the same moment"
            )
        self._recorded.add(attempt.id)

    def trust(self, attempt: Attempt) -> None:
        """Allow the record of ``attempt`` to be rewritten before the next commit if it is damaged. The caller knows
        that the number is this attempt's."""
        self._recorded.add(attempt.id)
        self._trusted.add(attempt.id)

    def check(self, attempt: Attempt) -> None:
        """Raise FencedError if a newer attempt than ``attempt`` exists here, or its number has another owner.

        A newer attempt of this process (after a restore of an older step) does not fence it. A damaged record of a
        newer attempt raises IntegrityError, since that attempt may be alive. Strays are ignored. The record of
        ``attempt`` itself is created where it is missing, and rewritten where it is damaged and this process has read
        it undamaged before.
        """
        if self._is_registered(attempt, doing="commit"):
            return
        if attempt.id in self._recorded - self._trusted:
            logger.warning(
                "tier %s: the record of attempt %d is gone from %s: were files of run %s deleted there while it "
                "trains? Checkpoints that were deleted are lost there; new ones are written to it",
                self._tier, attempt.number, without_secrets(self._backend.place), self._run,
            )  # fmt: skip
            self._on_emptied()
        try:
            self.create(attempt)  # the tier was unreachable at open
        except KeyExistsError as error:
            raise FencedError(
                f"commit on {self._tier}: attempt {attempt.number} of run {attempt.run!r} was taken by another "
                "process just now: this process must stop; nothing it writes counts any more"
            ) from error

    def check_newest(self, attempt: Attempt | None, *, doing: str = "change") -> None:
        """Raise FencedError as ``check`` does, before ``attempt`` deletes an object here or decides anything.

        A missing record is not created, because a full tier must stay deletable. None stands for a person's command,
        which has no attempt and is never fenced.
        """
        if attempt is not None:
            self._is_registered(attempt, doing=doing)

    def check_begin(self, attempt: Attempt) -> None:
        """Raise FencedError as ``check`` does, before ``attempt`` begins a copy here.

        Beginning a copy changes no object, so the attempts are listed only if this one's record was not seen yet, or
        one request shows that the next number is taken. A free number proves nothing, since a start that did not see
        this tier may have a higher one: the commit lists them again.
        """
        following = keys.attempt_key(self._run, attempt.number + 1)
        if attempt.id not in self._recorded or self._documents.exists(following):
            self.check(attempt)

    def _is_record_of(self, attempt: Attempt) -> bool:
        """Whether the record under an attempt's number is its own. A damaged record has no owner."""
        try:
            return self.read(attempt.number).id == attempt.id
        except (IntegrityError, KeyNotFoundError) as error:
            logger.warning("%s; that number is not taken", error)
            return False

    def _is_registered(self, attempt: Attempt, *, doing: str) -> bool:
        """Whether an attempt, or a newer one of this process, has its record here. Raises FencedError where another
        process has a newer one, or this number."""
        holder: Attempt | TierfallError | None
        try:
            holder = self.read(attempt.number)
        except KeyNotFoundError:
            holder = None
        except TierfallError as error:
            holder = error
        # last, to keep the time between this check and the caller's change short
        numbers = self.numbers()
        newer = self._newest_above(attempt.number, numbers)
        if newer is not None:
            if newer.id in self._own:
                return True
            raise FencedError(
                f"{doing} on {self._tier}: attempt {attempt.number} of run {attempt.run!r} was followed by attempt "
                f"{newer.number} (process {newer.pid} on {newer.node}): this process must stop; nothing it "
                "writes counts any more. If that process only reads, such as an evaluation, let it use tierfall.load, "
                "which takes no attempt"
            )
        if holder is not None:
            self._check_owner(attempt, holder, doing=doing)
        return holder is not None

    def _newest_above(self, number: int, numbers: Iterable[int]) -> Attempt | None:
        for newer in reversed([n for n in numbers if n > number]):
            try:
                return self.read(newer)
            except StrayAttemptError as error:
                if newer not in self._strays:
                    logger.warning("%s; until then it is ignored", error)
                self._strays.add(newer)
            except KeyNotFoundError:
                continue  # deleted since the listing
            except IntegrityError as error:
                raise IntegrityError(
                    f"{error}: it may belong to a newer start, in which case nothing may be committed here. If no "
                    f"newer start of run {self._run!r} is alive, remove that file: then this one continues"
                ) from error
        return None

    def _check_owner(
        self, attempt: Attempt, holder: Attempt | TierfallError, *, doing: str
    ) -> None:
        """Raise unless ``holder``, the record under an attempt's number or the error of reading it, is its own."""
        if isinstance(holder, IntegrityError):
            if attempt.id in self._recorded:
                key = keys.attempt_key(self._run, attempt.number)
                self._documents.replace(key, attempt.encode())
                logger.warning("%s; it was rewritten", holder)
                return
            raise IntegrityError(
                f"{holder}: it may belong to another start, in which case nothing may be committed here. If no "
                f"other start of run {self._run!r} is alive, remove that file: then this one continues"
            ) from holder
        if isinstance(holder, TierfallError):
            raise holder
        if holder.id != attempt.id:
            raise FencedError(
                f"{doing} on {self._tier}: attempt {attempt.number} of run {attempt.run!r} belongs to process "
                f"{holder.pid} on {holder.node}: this process must stop; nothing it writes counts any more"
            )
        self._recorded.add(attempt.id)


class LineageRecords:
    """Records of how attempts began, for attempts that have committed a checkpoint on this tier. A record outlives the
    attempt's checkpoints, so that what the attempt abandoned stays abandoned."""

    def __init__(self, documents: Documents, fence: Fence) -> None:
        self._run = documents.run
        self._documents = documents
        self._fence = fence
        self._known: set[Key] = set()

    def note(self, key: Key) -> None:
        """Note that the record of an attempt exists."""
        self._known.add(key)

    def has(self, number: int) -> bool:
        """Whether a record of an attempt of this number was seen or written."""
        return any(known == number for known, _ in self._known)

    def create(self, commit: Commit, writer: Attempt | None = None) -> None:
        """Create the record of the attempt of a committed checkpoint, once. ``writer`` is that attempt where the caller
        has it.

        It comes after the commit record: a start that dies before its first commit leaves no record behind.
        """
        line = commit.lineage
        number = line.checkpoint.attempt
        if (number, line.attempt_id) in self._known:
            return
        began_s = commit.wall_time_s
        if writer is None or writer.id != line.attempt_id:
            with suppress(KeyNotFoundError, IntegrityError, NotSupportedError):
                writer = self._fence.read(number)
        if writer is not None and writer.id == line.attempt_id:
            began_s = writer.wall_time_s
        start = replace(start_of(commit), began_s=max(0, int(began_s * 1000)) / 1000)
        name = keys.start_name(start)
        # A crafted commit record may have an id that no file name can have.
        if keys.parse_start(name) == start:
            with suppress(KeyExistsError):
                key = f"{self._run}/{keys.LINEAGE_FOLDER}/{name}"
                self._documents.create(key, encode_start(self._run, start))
        self.note((number, line.attempt_id))
