"""Attempts of one run on one tier: their records, the fence that stops a process once a newer attempt exists, and the
lineage records that keep how an attempt began.

An attempt's record is created under its number, conditionally where the backend can, so that two processes never share
a number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from tierfall.core.format.catalog import start_of
from tierfall.core.format.documents import read_twice
from tierfall.core.format.records import Attempt, Commit, encode_start, parse_attempt_record
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    FencedError,
    IntegrityError,
    KeyExistsError,
    KeyNotFoundError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.lineage import AttemptStart, Key
from tierfall.core.types.text import without_secrets
from tierfall.tiers.documents import Documents

logger = logging.getLogger("tierfall")


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
        began_ms = max(0, int(began_s * 1000))
        start = replace(start_of(commit), began_s=began_ms / 1000)
        name = keys.start_name(
            number, line.attempt_id, began_ms=began_ms, started_from=line.started_from
        )
        # A crafted commit record may have an id that no file name can have.
        if start_from_name(name) == start:
            with suppress(KeyExistsError):
                key = f"{self._run}/{keys.LINEAGE_FOLDER}/{name}"
                self._documents.create(key, encode_start(self._run, start))
        self.note((number, line.attempt_id))


def start_from_name(name: str) -> AttemptStart | None:
    """Read how an attempt began from the name of its lineage record; None for another name."""
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
