"""Cached totals over all entries equal totals computed anew, after any change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierfall.core.scheduler.ledger.entry import LedgerEntry
from tierfall.core.scheduler.ledger.ledger import Ledger
from tierfall.core.types.lineage import AttemptStart, Key, abandoned
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, Shard, TierKind
from tierfall.core.types.view import TierRules

RULES = (
    TierRules(name="host", kind=TierKind.HOST, survives=LossClass.PROCESS),
    TierRules(name="disk", kind=TierKind.FILE, survives=LossClass.NODE),
)
IDS = [CheckpointId(step, attempt) for step in range(4) for attempt in (1, 2, 3)]
TIERS = [rules.name for rules in RULES]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(IDS),
        st.sampled_from(
            ["add", "state", "owe", "lease", "mark", "verify", "overtake", "drop", "look", "step"]
        ),
        st.sampled_from(TIERS),
        st.sampled_from(list(CopyState)),
        st.integers(0, 3),
    ),
    max_size=40,
)


def change(
    ledger: Ledger, id: CheckpointId, what: str, tier: str, state: CopyState, number: int
) -> None:
    if what == "step":
        ledger.refresh()
        return
    if what == "look":
        ledger.view()
        return
    entry = ledger.entries.get(id)
    if entry is None:
        if what == "add":
            start = CheckpointId(number, 1) if number else None
            ledger.entries[id] = LedgerEntry(
                id=id, ordinal=1, started_from=start, shard=Shard(0, 1), attempt_id="a"
            )
        return
    change_entry(ledger, entry, what, tier, state, number)


def change_entry(
    ledger: Ledger, entry: LedgerEntry, what: str, tier: str, state: CopyState, number: int
) -> None:
    if what == "drop":
        entry.states.clear()
        entry.owed.clear()
        ledger.forget_if_gone(entry)
    elif what == "state":
        entry.set_state(tier, state, number)
    elif what == "owe":
        ledger.abandoned()  # somebody asks while the entry is in hand
        entry.owed ^= {tier}
    elif what == "lease":
        entry.leases[tier] = number % 2
    elif what == "overtake":
        entry.overtaken ^= {tier}
    elif what == "mark":
        entry.set_mark(tier, "pin" if number % 2 else "tombstone", there=number > 1)
    elif what == "verify":
        ledger.used_bytes(tier)
        entry.verified.add(tier)


@given(CHANGES)
def test_what_is_kept_is_what_all_entries_say(
    changes: list[tuple[CheckpointId, str, str, CopyState, int]],
) -> None:
    kept = Ledger(RULES, "host")
    committed: dict[Key, AttemptStart] = {}
    for one in changes:
        change(kept, *one)
        kept.abandoned()  # whatever has been committed by now counts for ever
        for entry in kept.entries.values():
            if entry.start is not None and CopyState.COMMITTED in entry.states.values():
                committed.setdefault(entry.start.key, entry.start)
    anew = Ledger(RULES, "host")
    entries = list(kept.entries.values())
    whole = [e for e in entries if e.is_whole]
    starts = {start.key: start for e in whole if (start := e.start) is not None}
    left = abandoned(((e.id, e.attempt_id) for e in whole), [*starts.values(), *committed.values()])
    assert set(kept.abandoned()) == left
    for tier in TIERS:
        assert kept.used_bytes(tier) == sum(e.bytes.get(tier, 0) for e in entries)
        assert kept.count_on(tier) == sum(e.readable_on(tier) for e in entries)
        leaving = [e for e in entries if e.state(tier) is CopyState.LEAVING]
        assert kept.bytes_being_deleted(tier) == sum(e.bytes.get(tier, 0) for e in leaving)
    assert {e.id for e in kept.overtaken()} == {e.id for e in entries if e.overtaken}
    assert kept.all_live == (not left and not any(e.tombstoned for e in entries))
    assert kept.has_unverified == any(e.is_unverified for e in entries)
    assert {e.id for e in kept.open()} >= {e.id for e in entries if not e.is_settled}
    assert list(kept.entries.ids()) == sorted(e.id for e in entries)
    view = kept.view()
    anew._overview.lineage.set_starts(committed)
    for entry in entries:
        anew.entries[entry.id] = entry
    assert view == anew.view()
