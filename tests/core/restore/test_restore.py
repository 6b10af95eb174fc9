"""Which step a restore chooses, from which copies it reads, and its reasons when it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from restore_help import (
    Tiers,
    checkpoint,
    flip,
    holds,
    passed_over,
    state_of,
)

from tierfall.core.types.errors import (
    RestoreError,
)
from tierfall.core.types.values import CheckpointId


@pytest.fixture
def state() -> dict[str, Any]:
    return state_of(-1)


# Which copy ------------------------------------------------------------------------------------------


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


# Nothing, and could not look -------------------------------------------------------------------------


def test_not_one_byte_of_a_damaged_chunk_reaches_the_state(state: dict[str, Any]) -> None:
    tiers = Tiers("nvme")
    flip(tiers.put("nvme", checkpoint(5)), 1)
    with pytest.raises(RestoreError):
        tiers.restore(state)
    assert not (state["w"][:1024] == 5.0).any()  # the first chunk was the damaged one


def test_a_chunk_that_came_damaged_from_a_tier_is_read_once_more(state: dict[str, Any]) -> None:
    """Something on the way may have been at fault, once."""
    tiers = Tiers("nvme")
    image = tiers.put("nvme", checkpoint(5))
    read = image.read

    def misread(
        manifest: Any, index: int, buffer: memoryview, *, again: bool = False
    ) -> memoryview:
        view = read(manifest, index, buffer, again=again)
        if index == 3 and not again:
            view[17] ^= 4
        return view

    image.read = misread  # type: ignore[method-assign]
    restored = tiers.restore(state)
    assert restored is not None
    assert holds(state, 5)
    assert any("chunk 3 of 5@1 on nvme" in output for output in passed_over(restored))
