"""The simulation sees what it is for: each of some bugs, planted by hand, makes an hour of training break a promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulation import many, rank, world
from tests.simulation.hour import run_hour
from tests.simulation.many_hour import ManyHour, run_many_hour
from tierfall.core.capture.copier import chunk_digest
from tierfall.core.copies.images import Image, check_digest
from tierfall.core.flush import worker
from tierfall.core.flush.deleter import Deleter
from tierfall.core.flush.facts import CopyFailures, LedgerEntry
from tierfall.core.flush.flusher import Flusher
from tierfall.core.flush.lane import FlushLane
from tierfall.core.flush.messages import DeletedCopy, Messages
from tierfall.core.format import catalog
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.records import Manifest
from tierfall.core.ranks.messages import Message
from tierfall.core.types.values import CopyState
from tierfall.core.types.view import CheckpointView, CopyView, View
from tierfall.policies import cadence, protection
from tierfall.run.cadence import AnnouncedSteps
from tierfall.setup.tier_identity import TierIdentities
from tierfall.tiers.run_files import Documents, Fence
from tierfall.tiers.stored import StoredTier

SEEDS = 60
"""How many hours may pass until a bug is found. ``first`` is the seed that found it last."""
LONG = pytest.mark.torture


def evict_before_the_successors_commit(patch: pytest.MonkeyPatch) -> None:
    """A newer copy that is only arriving counts for the newest that survives a loss."""

    def is_there(view: CheckpointView, tier: str) -> CopyState:
        state = real(view, tier)
        return CopyState.COMMITTED if state is CopyState.ARRIVING else state

    def is_safe(view: View, checkpoint: CheckpointView, tier: str) -> bool:
        return safe(view, checkpoint, tier) or real(checkpoint, tier) is CopyState.ARRIVING

    real, safe = CheckpointView.state, View.is_safe
    held = protection._survives_newer

    def held_soon(*arguments: Any, **more: Any) -> bool:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(CheckpointView, "state", is_there)
            inside.setattr(View, "is_safe", is_safe)
            return held(*arguments, **more)

    patch.setattr(protection, "_survives_newer", held_soon)


def count_what_has_nan(patch: pytest.MonkeyPatch) -> None:
    """A newer checkpoint with NaN takes the place of a good one."""
    patch.setattr(protection, "gone_bad", lambda checkpoint, older: frozenset())


def forget_a_pin(patch: pytest.MonkeyPatch) -> None:
    """What is decided by a pin does not reach the policies."""
    real = LedgerEntry.decide

    def decide(entry: LedgerEntry, decided: DecidedList) -> None:
        real(entry, decided)
        entry.pinned = False

    patch.setattr(LedgerEntry, "decide", decide)


def count_uncommitted_ones(patch: pytest.MonkeyPatch) -> None:
    """A copy that is only arriving takes a place of those that are kept."""

    def readable_on(view: CheckpointView, tier: str) -> bool:
        return real(view, tier) or view.state(tier) is CopyState.ARRIVING

    real = CheckpointView.readable_on
    patch.setattr(CheckpointView, "readable_on", readable_on)


def drop_a_leased_copy(patch: pytest.MonkeyPatch) -> None:
    """Whether somebody reads a copy does not count."""
    patch.setattr(CopyView, "leased", property(lambda view: False, lambda view, value: None))


def rely_on_what_nobody_has_read(patch: pytest.MonkeyPatch) -> None:
    """A copy of an earlier start counts as good by its commit record."""

    def is_safe(view: View, checkpoint: CheckpointView, tier: str) -> bool:
        return checkpoint.state(tier) is CopyState.COMMITTED

    patch.setattr(View, "is_safe", is_safe)


def believe_the_commit_record(patch: pytest.MonkeyPatch) -> None:
    """A listing does not look at which files are there."""
    patch.setattr(StoredTier, "_with_damage", lambda catalog, copy, files: copy)


def look_for_newer_attempts_at_commits_only(patch: pytest.MonkeyPatch) -> None:
    """A process that was taken for lost goes on to delete and to write over."""
    patch.setattr(Fence, "check_newest", lambda self, attempt, **more: None)


def decide_per_rank(patch: pytest.MonkeyPatch) -> None:
    """Each rank works out by itself what its tiers retain, and drops it."""
    patch.setattr(Deleter, "schedule_plan", lambda self, tier: self._due.add(tier))
    patch.setattr(Deleter, "_applies_rules", lambda self: not self.rules_are_suspended)
    real = Messages.announce_to_others

    def announce(messages: Messages, body: Message, *more: Any) -> None:
        if not isinstance(body, DeletedCopy):
            real(messages, body, *more)

    patch.setattr(Messages, "announce_to_others", announce)


def save_twice_as_often(patch: pytest.MonkeyPatch) -> None:
    """What a save costs is taken for half of it, wherever an interval is chosen by it."""
    for name in ("overhead_steps", "daly_s"):
        real = getattr(cadence, name)
        patch.setattr(cadence, name, lambda cost, *more, real=real: real(cost / 4, *more))


def save_at_once(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves the step that it is at, which others may have passed."""
    patch.setattr(AnnouncedSteps, "lead_steps", lambda self, pace_s: 0)


def keep_the_turn_of_a_copy_that_fails(patch: pytest.MonkeyPatch) -> None:
    """A copy that can never be written comes first for ever."""
    patch.setattr(FlushLane, "rounds_failed", lambda self, entry: 0)


def blame_a_copy_for_its_tier(patch: pytest.MonkeyPatch) -> None:
    """A copy that fails some times is set aside, whether the tier takes others or not."""

    def note(failures: CopyFailures, arrivals: int, *, lasts: bool) -> None:
        real(failures, arrivals, lasts=lasts)
        failures.others_arrived = failures.count

    real = CopyFailures.record
    patch.setattr(CopyFailures, "record", note)


def forget_what_was_set_aside(patch: pytest.MonkeyPatch) -> None:
    """The records of newer ones do not say what the tier is still owed."""
    patch.setattr(Flusher, "older_owed", lambda flusher, tier, entry: ())


def take_an_absent_tier_for_an_empty_one(patch: pytest.MonkeyPatch) -> None:
    """A start believes the empty folder below a mount."""
    patch.setattr(TierIdentities, "missing", lambda identities, listings: {})


def leave_no_room_for_numbers_that_cannot_be_seen(patch: pytest.MonkeyPatch) -> None:
    """A start that cannot ask a tier takes the number above those that it sees."""
    patch.setattr(catalog, "UNSEEN_ATTEMPTS", 0)


def try_a_copy_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A copy that can never be written is not set aside."""
    patch.setattr(Flusher, "_set_aside", lambda flusher, entry, tier, cause: None)


def believe_a_record_that_a_start_finds(patch: pytest.MonkeyPatch) -> None:
    """A start does not fsync the folders of what an earlier one left."""
    for module in (world, rank):
        patch.setattr(module, "make_durable", lambda store, listing: listing)


def believe_a_record_that_was_not_synced(patch: pytest.MonkeyPatch) -> None:
    """A second try that finds its commit record takes it for durable."""
    patch.setattr(Documents, "sync", lambda documents, key: None)


def take_a_misread_for_damage(patch: pytest.MonkeyPatch) -> None:
    """A flush reads a chunk once: a wrong read counts as damage."""

    def read_once(
        image: Image, manifest: Manifest, index: int, buffer: memoryview, **more: Any
    ) -> memoryview:
        view = image.read(manifest, index, buffer, again=True)
        check_digest(image.tier, manifest, index, chunk_digest(view))
        return view

    patch.setattr(worker, "read_chunk", read_once)


def ignore_what_other_ranks_have_listed(patch: pytest.MonkeyPatch) -> None:
    """A rank that cannot list a tier at a start does without what other ranks have found there."""
    patch.setattr(many, "fill_in", lambda listings, start, reported_by: listings)


def run_storage_hour(seed: int) -> ManyHour:
    """Live through an hour of several ranks whose storage fails, too."""
    return run_many_hour(seed, storage=True)


def first_wrong(run: Callable[[int], object], seeds: range) -> tuple[int, str]:
    """The first of these runs that breaks a promise, and what it says."""
    for seed in seeds:
        try:
            run(seed)
        except AssertionError as error:
            return seed, str(error)
    raise AssertionError(f"none of {len(seeds)} runs broke a promise")


@pytest.mark.parametrize(
    ("plant", "run", "first"),
    [
        (evict_before_the_successors_commit, run_hour, 5),
        (count_what_has_nan, run_hour, 1),
        (forget_a_pin, run_hour, 0),
        (count_uncommitted_ones, run_hour, 0),
        (drop_a_leased_copy, run_hour, 4),
        (believe_the_commit_record, run_hour, 2),
        (rely_on_what_nobody_has_read, run_hour, 12),
        (save_twice_as_often, run_hour, 0),
        (look_for_newer_attempts_at_commits_only, run_hour, 21),
        pytest.param(keep_the_turn_of_a_copy_that_fails, run_hour, 7, marks=LONG),
        (blame_a_copy_for_its_tier, run_hour, 3),
        (forget_what_was_set_aside, run_hour, 23),
        (take_an_absent_tier_for_an_empty_one, run_hour, 0),
        (leave_no_room_for_numbers_that_cannot_be_seen, run_hour, 0),
        pytest.param(believe_a_record_that_was_not_synced, run_hour, 4, marks=LONG),
        (take_a_misread_for_damage, run_hour, 84176),
        (try_a_copy_for_ever, run_hour, 1),
        (decide_per_rank, run_many_hour, 1),
        (save_at_once, run_many_hour, 4),
        (take_an_absent_tier_for_an_empty_one, run_storage_hour, 3),
        (believe_the_commit_record, run_storage_hour, 1),
        (look_for_newer_attempts_at_commits_only, run_storage_hour, 14),
        (leave_no_room_for_numbers_that_cannot_be_seen, run_storage_hour, 14),
        (ignore_what_other_ranks_have_listed, run_storage_hour, 124),
        (try_a_copy_for_ever, run_storage_hour, 7),
        (believe_a_record_that_a_start_finds, run_storage_hour, 25),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_bug_is_found_and_its_seed_is_reported(
    plant: Callable[[pytest.MonkeyPatch], None],
    run: Callable[[int], Any],
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    seed, output = first_wrong(run, range(first, first + SEEDS))
    assert output.startswith(f"seed {seed}")
    assert f"--first {seed} --seeds 1" in output
