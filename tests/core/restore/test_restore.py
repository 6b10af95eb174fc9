"""Which step a restore chooses, from which copies it reads, and its reasons when it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from restore_help import (
    Tiers,
    checkpoint,
    chunks_read,
    flip,
    holds,
    passed_over,
    start_of,
    state_of,
)

from tierfall.core.types.errors import (
    BackendError,
    IntegrityError,
    NotSupportedError,
    RestoreError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId

HALF = "HALF FILLED"


@pytest.fixture
def state() -> dict[str, Any]:
    return state_of(-1)


# Which copy ------------------------------------------------------------------------------------------


def test_everything_is_read_from_the_fastest_copy(state: dict[str, Any]) -> None:
    tiers = Tiers("host", "nvme", "store")
    images = [tiers.put(name, checkpoint(5)) for name in tiers.names]
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert set(restored.tally.bytes) == {"host"}
    assert restored.tally.bytes["host"] == len(images[0].made.image)
    assert chunks_read(images[0]) == {0, 1, 2, 3, 4, 5}
    assert images[1].reads == images[2].reads == []
    assert restored.tally.fallbacks == []


@pytest.mark.parametrize("chunk", range(6))
def test_a_damaged_chunk_is_read_from_the_next_copy_and_only_that_one(
    chunk: int, state: dict[str, Any]
) -> None:
    tiers = Tiers("host", "nvme", "store")
    bad = tiers.put("host", checkpoint(5))
    good = tiers.put("nvme", checkpoint(5))
    never = tiers.put("store", checkpoint(5))
    flip(bad, chunk)
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert chunks_read(good) == {chunk}
    assert never.reads == []
    (output,) = passed_over(restored)
    assert output.startswith(f"chunk {chunk} of 5@1 on host: ")
    assert "does not match its digest" in output


def test_damage_of_different_chunks_in_every_copy_still_makes_one_good_image(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "pfs", "store")
    for number, name in enumerate(tiers.names):
        flip(tiers.put(name, checkpoint(5)), number + 1)
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert set(restored.tally.bytes) == {"nvme", "pfs"}


@pytest.mark.parametrize("error", [UnreachableError("timeout"), BackendError("medium error")])
def test_a_chunk_that_cannot_be_read_comes_from_the_next_copy(
    error: BackendError, state: dict[str, Any]
) -> None:
    tiers = Tiers("nvme", "store")
    bad = tiers.put("nvme", checkpoint(5))
    bad.errors[start_of(bad, 3)] = error
    tiers.put("store", checkpoint(5))
    assert tiers.restore(state) is not None
    assert holds(state, 5)


@pytest.mark.parametrize(
    "error", [IntegrityError("digest"), UnreachableError("timeout"), NotSupportedError("format 2")]
)
def test_a_copy_without_a_good_manifest_is_passed_over_whole(
    error: Any, state: dict[str, Any]
) -> None:
    tiers = Tiers("nvme", "store")
    bad = tiers.put("nvme", checkpoint(5))
    bad.manifest_error = error
    tiers.put("store", checkpoint(5))
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert bad.reads == []
    assert any("5@1 on nvme" in output for output in passed_over(restored))


def test_a_manifest_that_its_commit_record_does_not_name_is_not_believed(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "store")
    made, other = checkpoint(5), checkpoint(6)
    made.manifest = dataclasses.replace(made.manifest, digests=other.manifest.digests)
    tiers.put("nvme", made)
    tiers.put("store", checkpoint(5))
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert any("not the manifest that the commit" in output for output in passed_over(restored))


def test_copies_of_one_name_with_different_content_are_never_mixed(state: dict[str, Any]) -> None:
    """The same step and attempt, but another snapshot: half from here and half from there would be neither."""
    tiers = Tiers("nvme", "store")
    fast = tiers.put("nvme", checkpoint(5))
    stranger = checkpoint(6)
    line = dataclasses.replace(stranger.commit.lineage, checkpoint=CheckpointId(5, 1))
    stranger.manifest = dataclasses.replace(stranger.manifest, lineage=line)
    data = stranger.manifest.encode()
    from tierfall.core.format.documents import sha256

    files = (
        stranger.commit.files[0],
        dataclasses.replace(stranger.commit.files[1], bytes=len(data), digest=sha256(data)),
    )
    stranger.commit = dataclasses.replace(stranger.commit, lineage=line, files=files)
    slow = tiers.put("store", stranger)
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert slow.reads == []
    assert any("holds another snapshot of 5@1" in output for output in passed_over(restored))
    flip(fast, 2)
    with pytest.raises(RestoreError, match="damaged in every copy"):
        tiers.restore(state_of(-1))


# Which step ------------------------------------------------------------------------------------------


def test_the_newest_step_is_restored_wherever_it_lies(state: dict[str, Any]) -> None:
    tiers = Tiers("host", "nvme", "store")
    tiers.put("host", checkpoint(4))
    tiers.put("nvme", checkpoint(3))
    tiers.put("store", checkpoint(5))
    restored = tiers.restore(state)
    assert restored is not None
    assert restored.checkpoint.id == CheckpointId(5, 1)
    assert holds(state, 5)


def test_a_step_that_is_damaged_everywhere_gives_way_to_the_one_before_which_refills_all(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "store")
    for name in tiers.names:
        tiers.put(name, checkpoint(4))
        flip(tiers.put(name, checkpoint(5)), 4)
    restored = tiers.restore(state)
    assert restored is not None
    assert restored.checkpoint.id == CheckpointId(4, 1)
    assert holds(state, 4)
    assert any(output.startswith("step 5@1: ") for output in passed_over(restored))


def test_a_damaged_commit_record_is_damage_and_gives_way(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(4))
    tiers.put("nvme", checkpoint(5), commit=None, damage=IntegrityError("commit.json: digest"))
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 4)
    assert any("commit.json: digest" in output for output in passed_over(restored))


def test_a_step_asked_for_by_name_is_never_another_one(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(3))
    tiers.put("nvme", checkpoint(4))
    flip(tiers.put("nvme", checkpoint(5)), 1)
    restored = tiers.restore(state, step=3)
    assert restored is not None
    assert holds(state, 3)
    with pytest.raises(RestoreError, match=r"5@1.*damaged") as caught:
        tiers.restore(state, step=5)
    assert HALF in str(caught.value)
    with pytest.raises(RestoreError, match=r"of step 9 .*there are: .*4@1 on nvme"):
        tiers.restore(state, step=9)


def test_abandoned_steps_are_restored_only_by_step_and_attempt(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme")
    for step in (1, 2, 3, 4):
        tiers.put("nvme", checkpoint(step))
    tiers.put("nvme", checkpoint(3, attempt=2, started_from=CheckpointId(2, 1)))
    restored = tiers.restore(state)
    assert restored is not None
    assert restored.checkpoint.id == CheckpointId(3, 2)
    with pytest.raises(RestoreError, match="lineage was abandoned"):
        tiers.restore(state, step=4)
    restored = tiers.restore(state, step=4, attempt=1)
    assert restored is not None
    assert holds(state, 4)
    restored = tiers.restore(state, step=3)
    assert restored is not None
    assert restored.checkpoint.id.attempt == 2


def test_what_a_person_deleted_is_not_restored_though_it_lies_there_still(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "store")
    tiers.put("nvme", checkpoint(4))
    tiers.put("nvme", checkpoint(5))
    tiers.put("store", checkpoint(5), marks=frozenset({"tombstone"}))
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 4)


def test_the_only_tier_that_is_named_is_the_only_one_read(state: dict[str, Any]) -> None:
    tiers = Tiers("host", "nvme", "store")
    fast = tiers.put("host", checkpoint(5))
    tiers.put("store", checkpoint(5))
    bad = tiers.put("nvme", checkpoint(5))
    restored = tiers.restore(state, tier="store")
    assert restored is not None
    assert set(restored.tally.bytes) == {"store"}
    flip(bad, 1)
    with pytest.raises(RestoreError):
        tiers.restore(state, tier="nvme")
    assert fast.reads == []


# Nothing, and could not look -------------------------------------------------------------------------


def test_none_is_reported_only_where_every_tier_answered_and_none_has_anything(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("host", "nvme")
    assert tiers.restore(state) is None
    tiers.errors["nvme"] = UnreachableError("timeout")
    with pytest.raises(RestoreError, match="nvme could not be read and may hold something newer"):
        tiers.restore(state)
    with pytest.raises(RestoreError, match="nvme could not be read, so it is not known"):
        tiers.restore(state, ignore_unreachable=True)
    del tiers.errors["nvme"]
    tiers.damaged["host"] = (IntegrityError("arena: block 3"),)
    with pytest.raises(RestoreError, match="block 3"):
        tiers.restore(state)


def test_nothing_on_the_tier_that_is_named_is_no_first_start_where_another_has_something(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "store")
    tiers.put("nvme", checkpoint(5))
    with pytest.raises(RestoreError, match=r"on tier store .*5@1 on nvme"):
        tiers.restore(state, tier="store")
    with pytest.raises(RestoreError, match=r"attempt 7 .*5@1"):
        tiers.restore(state, attempt=7)


def test_a_tier_that_cannot_be_asked_may_hold_something_newer(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme", "store")
    tiers.put("nvme", checkpoint(5))
    tiers.errors["store"] = UnreachableError("timeout")
    with pytest.raises(RestoreError, match="store could not be read") as caught:
        tiers.restore(state)
    assert isinstance(caught.value.__cause__, UnreachableError)
    assert holds(state, -1)
    restored = tiers.restore(state, ignore_unreachable=True)
    assert restored is not None
    assert holds(state, 5)
    assert any("tier store: timeout" in output for output in passed_over(restored))


def test_a_step_that_is_named_and_there_needs_no_other_tier_to_answer(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme", "store")
    tiers.put("nvme", checkpoint(5))
    tiers.errors["store"] = UnreachableError("timeout")
    assert tiers.restore(state, step=5) is not None
    assert holds(state, 5)
    with pytest.raises(RestoreError, match="store could not be read"):
        tiers.restore(state, step=4)
    assert tiers.restore(state_of(-1), tier="nvme") is not None


def test_a_newest_copy_that_does_not_answer_is_not_taken_for_damaged(
    state: dict[str, Any],
) -> None:
    """Going on to an older step because of a timeout would lose work that is still there."""
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(4))
    newest = tiers.put("nvme", checkpoint(5))
    newest.errors[start_of(newest, 2)] = UnreachableError("timeout")
    with pytest.raises(RestoreError, match="a copy could not be read, and no other is good"):
        tiers.restore(state)
    restored = tiers.restore(state, ignore_unreachable=True)
    assert restored is not None
    assert holds(state, 4)


def test_with_nothing_good_left_the_error_says_all_and_that_the_state_is_half_filled(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme")
    for step in (4, 5):
        flip(tiers.put("nvme", checkpoint(step)), 5)
    with pytest.raises(RestoreError, match="none of the checkpoints can be read whole") as caught:
        tiers.restore(state)
    assert "step 5@1" in str(caught.value)
    assert "step 4@1" in str(caught.value)
    assert HALF in str(caught.value)


def test_damage_before_any_byte_went_into_the_state_does_not_say_half_filled(
    state: dict[str, Any],
) -> None:
    tiers = Tiers("nvme")
    flip(tiers.put("nvme", checkpoint(5)), 0)
    with pytest.raises(RestoreError) as caught:
        tiers.restore(state)
    assert HALF not in str(caught.value)
    assert holds(state, -1)


def test_not_one_byte_of_a_damaged_chunk_reaches_the_state(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme")
    flip(tiers.put("nvme", checkpoint(5)), 1)
    with pytest.raises(RestoreError):
        tiers.restore(state)
    assert not (state["w"][:1024] == 5.0).any()  # the first chunk was the damaged one


def test_a_state_that_does_not_fit_is_refused_before_it_is_touched() -> None:
    tiers = Tiers("nvme")
    tiers.put("nvme", checkpoint(5))
    other = {"w": torch.zeros(7), "epoch": 0, "rng": None}
    with pytest.raises(RestoreError, match="w"):
        tiers.restore(other)
    assert torch.equal(other["w"], torch.zeros(7))
