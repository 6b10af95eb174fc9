"""Verifying a whole run: its copies, and the documents of each tier that belong to no single checkpoint.

It reads beside a living trainer. It changes nothing, except what a repairer that is passed in does, and the entries of
damage that ``record_damage`` adds. A trainer may reuse a region of memory while it is read here, so damage in memory
counts only if a second read finds it again.

Each finding has an advice, which never risks a good copy that was not seen: a tier that could not be read may hold one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierfall.config import Config
from tierfall.core.capture.snapshot import HostRegion
from tierfall.core.copies.verify import CheckedCopy, CopyVerifier, Damage
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.commit_files import same_checkpoint
from tierfall.core.format.records import Commit
from tierfall.core.types import keys
from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    TierfallError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.ops.commands import may_have
from tierfall.ops.reader import RunReader
from tierfall.ops.sync import NEWER, Repairer, open_writable
from tierfall.tiers.run_files import StrayAttemptError
from tierfall.tiers.stored import NamedInVainError, StoredTier

logger = logging.getLogger("tierfall")

SECOND_LOOKS = 20
BETWEEN_LOOKS_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem. ``id`` is None where it concerns a tier as a whole; ``newer``: it is not damaged, but a newer
    tierfall wrote it, and this one cannot read it."""

    tier: str
    id: CheckpointId | None
    file: str
    chunk: int | None = None
    problem: str
    newer: bool = False
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The results of a verification. ``unread`` are the tiers and copies that could not be read, each with the
    error."""

    copies: tuple[CheckedCopy, ...]
    findings: tuple[Finding, ...]
    unread: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyScope:
    """What to verify: some checkpoints (None: all), one tier (None: all)."""

    checkpoints: frozenset[CheckpointId] | None = None
    tier: str | None = None

    def covers(self, tier: str, id: CheckpointId | None = None) -> bool:
        return self.tier in (None, tier) and (
            id is None or self.checkpoints is None or id in self.checkpoints
        )


def planned_bytes(listings: Sequence[Listing], scope: VerifyScope) -> int:
    """Return the number of image bytes that a verification will read."""
    return sum(
        copy.commit.image_bytes if copy.commit else copy.bytes
        for listing in listings
        for copy in listing.copies
        if scope.covers(listing.tier, copy.id)
    )


def check_run(
    reader: RunReader,
    listings: Sequence[Listing],
    scope: VerifyScope,
    on_bytes: Callable[[int], None] = lambda count: None,
    repairer: Repairer | None = None,
) -> RunReport:
    """Verify every copy within ``scope``, in host memory too; with a ``repairer``, report what is damaged after it."""
    found: list[CheckedCopy] = []
    findings: list[Finding] = []
    unread: list[tuple[str, str]] = []
    notes: list[str] = []
    covered = [listing for listing in listings if scope.covers(listing.tier)]
    with CopyVerifier(on_bytes) as verifier:
        for listing in covered:
            if listing.error is not None:
                unread.append((listing.tier, str(listing.error)))
                continue
            is_host = listing.tier == reader.config.host.name
            if is_host or listing.tier in reader.stores:  # else it is not created yet
                check = _check_memory if is_host else _check_stored
                copies, more = check(reader, listing, scope, verifier)
                found += copies
                findings += more
                notes += [
                    f"{listing.tier} {id}: unfinished, so no checkpoint: a trainer is writing it, or the next start "
                    "deletes it"
                    for id in sorted(listing.unfinished)
                    if scope.covers(listing.tier, id)
                ]
        stored = [x for x in covered if x.error is None and x.tier in reader.stores]
        for listing in stored if scope.checkpoints is None else ():
            store = reader.stores[listing.tier]
            try:
                wrong = _check_tier(store, listing)
                # before the copies: none is written where the newest attempt is not known
                if repairer is not None and wrong:
                    repairer.repair_tier(
                        store.name, [each.file for each in wrong if not each.newer]
                    )
                    wrong = _check_tier(store, listing)
                findings += wrong
            except BackendError as error:
                unread.append((listing.tier, str(error)))
        copies = [repairer.repair(c, verifier) if repairer and c.damage else c for c in found]
    findings += _damage_findings(copies, listings, reader)
    findings += _contradictions(copies)
    unread += [(f"{c.tier} {c.id}", str(c.error)) for c in copies if c.error is not None]
    for copy in copies:
        if copy.gone:
            notes.append(f"{copy.tier} {copy.id}: was deleted while it was read")
        notes += [f"{copy.tier} {copy.id}: {n} is not part of the checkpoint" for n in copy.foreign]
    return RunReport(
        copies=tuple(copies), findings=tuple(findings), unread=tuple(unread), notes=tuple(notes)
    )


def record_damage(
    config: Config, listings: Sequence[Listing], report: RunReport
) -> tuple[str, ...]:
    """Note on each stored tier which of its copies are damaged, for later listings; and which are good again.

    Return a note for what could not be written. A damaged copy is read once more before: another command may have
    repaired it meanwhile. Nothing is written where the tier's list is right already.
    """
    known = {(x.tier, c.id): c for x in listings for c in x.copies}
    notes = []
    for tier in (tier.name for tier in config.stored):
        copies = [copy for copy in report.copies if copy.tier == tier]
        damaged = [copy for copy in copies if copy.commit is not None and copy.spoiled]
        mended = [copy for copy in copies if copy.good and known[tier, copy.id].damage is not None]
        if not damaged and not mended:
            continue
        try:
            with open_writable(config, tier) as store, CopyVerifier() as verifier:
                store.decided.read()
                for copy in mended:
                    if copy.commit is not None:
                        store.note_mended(copy.commit)
                for copy in damaged:
                    again = verifier.check_stored(store, copy.id)
                    first = next((damage for damage in again.damage if not damage.newer), None)
                    if first is not None and again.commit is not None:
                        store.note_damaged(again.commit, f"{first.file}: {first.problem}")
        except TierfallError as error:
            ids = ", ".join(str(copy.id) for copy in (*damaged, *mended))
            notes.append(f"{tier} {ids}: the damage could not be recorded there: {error}")
    return tuple(notes)


# Stored tiers ----------------------------------------------------------------------------------------


def _check_stored(
    reader: RunReader, listing: Listing, scope: VerifyScope, verifier: CopyVerifier
) -> tuple[list[CheckedCopy], list[Finding]]:
    """Verify the copies on a stored tier. What has no record, and had none before, is a finding."""
    store, found, findings = reader.stores[listing.tier], [], []
    for copy in listing.copies:
        if not scope.covers(listing.tier, copy.id):
            continue
        if isinstance(copy.damage, NamedInVainError) and scope.checkpoints is None:
            continue  # ``latest`` alone names it, and is checked
        checked = verifier.check_stored(store, copy.id)
        if checked.gone and copy.damage is not None and copy.commit is None:
            text = str(copy.damage).removeprefix(f"{listing.tier}: ")
            problem, _, advice = text.partition(": ")
            findings.append(
                Finding(tier=listing.tier, id=copy.id, file="", problem=problem, advice=advice)
            )
        else:
            found.append(checked)
    return found, findings


# Memory ----------------------------------------------------------------------------------------------


def _check_memory(
    reader: RunReader, listing: Listing, scope: VerifyScope, verifier: CopyVerifier
) -> tuple[list[CheckedCopy], list[Finding]]:
    """Verify the images in memory; beside a living trainer, read again what seems damaged."""
    found = _look_at_memory(reader, scope, verifier)
    broken = tuple(listing.damaged)
    for _ in range(SECOND_LOOKS):
        if reader.owner() is None or not (broken or any(c.damage for c in found)):
            break
        time.sleep(BETWEEN_LOOKS_S)  # a trainer may be writing there now; real damage stays
        reader.reopen_memory()
        again = {c.id: c for c in _look_at_memory(reader, scope, verifier)}
        broken = reader.memory().damaged
        gone = {c.id: CheckedCopy(id=c.id, tier=c.tier, gone=True) for c in found}
        found = [(gone | again)[c.id] if c.damage else c for c in found]
    advice = (
        f"the image in memory is lost, restores read the other tiers; the next start frees its file in "
        f"{reader.memory_folder}"
    )
    return found, [
        Finding(tier=listing.tier, id=None, file="", problem=str(error), advice=advice)
        for error in broken
        if scope.checkpoints is None
    ]


def _look_at_memory(
    reader: RunReader, scope: VerifyScope, verifier: CopyVerifier
) -> list[CheckedCopy]:
    regions: dict[CheckpointId, list[HostRegion]] = {}
    for id, image in reader.images():
        if scope.covers(reader.config.host.name, id):
            regions.setdefault(id, []).append(image.region)
    return [
        verifier.check_regions(reader.config.host.name, id, held)
        for id, held in sorted(regions.items())
    ]


# A tier as a whole -----------------------------------------------------------------------------------


def _check_tier(store: StoredTier, listing: Listing) -> list[Finding]:
    """Check the records of attempts, and ``latest``."""
    findings = []
    for number in listing.attempts:
        key = keys.attempt_key("", number).lstrip("/")
        try:
            store.fence.read(number)
        except (IntegrityError, NotSupportedError) as error:
            advice = (
                "no start wrote it: remove it"
                if isinstance(error, StrayAttemptError)
                else "without it no process can tell whether a newer attempt exists; to rewrite it from a tier that "
                f"has it: tierfall verify --tier {store.name} --repair; if none has it, and no start of that number "
                "is alive, remove it"
            )
            findings.append(_tier_finding(store, key, error, advice))
    latest = store.latest.read()
    if latest is None or may_have(store, latest) or store.latest.read() != latest:
        return findings
    problem = IntegrityError(f"it names {latest}, which does not exist")
    advice = (
        "if the folder of the step was moved, bring it back; if it was deleted, the next commit there has it name "
        f"another step, and so does tierfall verify --tier {store.name} --repair"
    )
    return [*findings, _tier_finding(store, keys.LATEST_NAME, problem, advice)]


def _tier_finding(store: StoredTier, file: str, error: TierfallError, advice: str) -> Finding:
    problem = str(error).rpartition(f"{file}: ")[2]
    newer = isinstance(error, NotSupportedError)
    return Finding(
        tier=store.name,
        id=None,
        file=file,
        problem=problem,
        advice=NEWER if newer else advice,
        newer=newer,
    )


# The findings of copies ------------------------------------------------------------------------------


def _damage_findings(
    copies: Sequence[CheckedCopy],
    listings: Sequence[Listing],
    reader: RunReader,
) -> list[Finding]:
    """Return a finding for all damage of these copies, with an advice by the other copies and the unread tiers."""
    holding = {c.id: set(c.copies) for c in merge(listings)}
    silent = [listing.tier for listing in listings if listing.error is not None]
    findings = []
    for copy in copies:
        same = [c for c in copies if c.id == copy.id]
        unread = [*silent, *(c.tier for c in same if c.error is not None)]
        left_out = holding.get(copy.id, set()) - {c.tier for c in same}
        for damage in copy.damage:
            findings.append(
                Finding(
                    tier=copy.tier,
                    id=copy.id,
                    file=damage.file,
                    chunk=damage.chunk,
                    problem=damage.problem,
                    newer=damage.newer,
                    advice=_advice(copy, damage, same, unread, left_out, reader),
                )
            )
    return findings


def _advice(
    copy: CheckedCopy,
    damage: Damage,
    same: Sequence[CheckedCopy],
    unread: Sequence[str],
    left_out: set[str],
    reader: RunReader,
) -> str:
    """Return what to do. ``same`` are the verified copies of the checkpoint, ``left_out`` the tiers whose copy was not
    verified, ``unread`` those that could not be read. A deletion is advised only where both are empty."""
    repair = f"tierfall verify {copy.id} --tier {copy.tier} --repair"
    if damage.newer:
        return NEWER
    good = [c.tier for c in same if c.good]
    if good and copy.tier in reader.stores:
        return f"restores read {good[0]} instead; to repair it: {repair}"
    if good:
        return f"restores read {good[0]} instead"
    if mending := [c.tier for c in same if c.tier != copy.tier and _has_part(c, damage)]:
        return f"restores read this part from {mending[0]}; to repair it: {repair}"
    if left_out:
        return f"other tiers hold it too; to repair it from them: {repair}"
    if unread:
        tiers = ", ".join(dict.fromkeys(unread))
        return (
            f"no good copy of it was found, but {tiers} could not be read and may hold one: keep it, and once that "
            f"answers run: tierfall verify {copy.id}"
        )
    if any(d.newer for c in same for d in c.damage):
        return "this tierfall finds no good copy of it; a newer version wrote some of it: use that version"
    return f"no good copy of it is left: restores choose an older step; to delete it: tierfall rm {copy.id}"


def _has_part(copy: CheckedCopy, damage: Damage) -> bool:
    """Return whether a damaged copy has the chunk that is damaged in another one."""
    shard = keys.parse_shard(damage.file)
    if damage.chunk is None or copy.commit is None or copy.error is not None or copy.gone:
        return False
    return not any(
        d.file == keys.COMMIT_NAME
        or (keys.parse_shard(d.file) == shard and d.chunk in (None, damage.chunk))
        for d in copy.damage
    )


def _contradictions(copies: Sequence[CheckedCopy]) -> list[Finding]:
    """Return a finding for each undamaged copy that is another checkpoint than an undamaged one of its id before it."""
    good: dict[CheckpointId, list[tuple[str, Commit]]] = {}
    findings = []
    for copy in copies:
        if copy.commit is None or copy.damage:
            continue
        commit, before = copy.commit, good.setdefault(copy.id, [])
        others = [tier for tier, other in before if not same_checkpoint(commit, other)]
        before.append((copy.tier, commit))
        if others:
            findings.append(
                Finding(
                    tier=copy.tier,
                    id=copy.id,
                    file=keys.COMMIT_NAME,
                    problem=f"it is another checkpoint than that on {others[0]}",
                    advice=f"restores read {others[0]}; find out what wrote this one, and move its folder away",
                )
            )
    return findings
