"""The findings of a verification: each with its place and an advice.

It reads nothing. An advice never risks a good copy that was not seen: a tier that could not be read may hold one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierfall.core.copies.verify import CheckedCopy, Damage
from tierfall.core.format.catalog import Listing, merge
from tierfall.core.format.commit_files import same_checkpoint
from tierfall.core.format.records import Commit
from tierfall.core.types import keys
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import RunReader

NEWER = "a newer tierfall wrote it: verify it with that version; this one does not change it"


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


def damage_findings(
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
    if damage.file.startswith(f"{keys.MARKS_FOLDER}/") and copy.tier in reader.stores:
        return f"it is effective nevertheless; to rewrite it: {repair}"
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


def contradictions(copies: Sequence[CheckedCopy]) -> list[Finding]:
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
