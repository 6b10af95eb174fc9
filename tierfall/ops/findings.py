"""What a check found, as it is reported: each thing that is wrong, where, and what helps.

It reads nothing. What it advises must never cost a good copy that was not seen: a tier that could not be read may hold
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.copies.verify import CheckedCopy, Damage
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.commit_files import same_checkpoint
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import RunReader

NEWER = "a newer tierfall wrote it: check it with that one; this one leaves it as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, where, and what helps. ``id`` is None where it concerns a tier as a whole."""

    tier: str
    id: CheckpointId | None
    file: str
    chunk: int | None = None
    problem: str
    newer: bool = False
    """It is not damaged: a newer tierfall wrote it, and this one cannot read it."""
    advice: str


def damage_findings(
    copies: Sequence[CheckedCopy],
    listings: Sequence[Listing],
    reader: RunReader,
) -> list[Finding]:
    """Say of everything that is wrong with a copy what helps, given the other copies and what could not be read."""
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
    """Say what helps. ``same`` are the copies of the checkpoint that were checked; ``left_out`` tiers hold it and were
    not, ``unread`` ones could not be read. A deletion is named only where there is neither."""
    repair = f"tierfall verify {copy.id} --tier {copy.tier} --repair"
    if damage.newer:
        return NEWER
    if damage.file.startswith(f"{keys.MARKS_FOLDER}/") and copy.tier in reader.stores:
        return f"it counts all the same; to write it anew: {repair}"
    if damage.file == keys.INDEX_NAME:
        return f"the manifests say the same, restores do without it; to make it anew: {repair}"
    good = [c.tier for c in same if c.good]
    if good and copy.tier in reader.stores:
        return f"restores take {good[0]} instead; to repair it: {repair}"
    if good:
        return f"restores take {good[0]} instead"
    if left_out:
        return f"other tiers hold it too; to repair it from them: {repair}"
    if unread:
        tiers = ", ".join(dict.fromkeys(unread))
        return (
            f"no good copy of it was found, but {tiers} could not be read and may hold one: keep it, and check again "
            f"once that answers: tierfall verify {copy.id}"
        )
    if any(d.newer for c in same for d in c.damage):
        return "no copy of it is good, as far as this tierfall can read; a newer one wrote some of it: use that"
    return f"no good copy of it is left: restores pass it over for an older step; tierfall rm {copy.id}"


def contradictions(copies: Sequence[CheckedCopy]) -> list[Finding]:
    """Two copies of one checkpoint that are each whole, and differ."""
    first: dict[CheckpointId, CheckedCopy] = {}
    findings = []
    for copy in copies:
        if copy.commit is None or copy.damage:
            continue
        other = first.setdefault(copy.id, copy)
        assert other.commit is not None
        if not same_checkpoint(copy.commit, other.commit):
            findings.append(
                Finding(
                    tier=copy.tier,
                    id=copy.id,
                    file=keys.COMMIT_NAME,
                    problem=f"it is another checkpoint than the one on {other.tier}",
                    advice=f"restores take {other.tier}; find out who wrote this one, and move its folder away",
                )
            )
    return findings
