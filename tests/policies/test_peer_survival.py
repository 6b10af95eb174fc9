"""What peer memory survives: the newest checkpoint that is committed there, and who holds its images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierfall.core.types.values import CheckpointId, CopyState, TierKind, survives
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View
from tierfall.policies.eviction import plan_eviction
from tierfall.policies.forecast import peer_survival
from tierfall.policies.placement import place_copies

PLACED = place_copies([f"n{node}" for node in range(4)], 2)


def view_of(**checkpoints: dict[str, str]) -> View:
    """A view of checkpoints, each by its step, and what host memory, peers and a disk have of it."""
    kinds = {"host": TierKind.HOST, "peers": TierKind.PEER, "disk": TierKind.FILE}
    return View(
        tiers=tuple(
            TierRules(name=name, kind=kind, survives=survives(kind, shared=False))
            for name, kind in kinds.items()
        ),
        checkpoints=tuple(
            CheckpointView(
                id=CheckpointId(*map(int, name.removeprefix("at_").split("_"))),
                ordinal=1,
                started_from=None,
                copies={t: CopyView(state=CopyState(s), bytes=1) for t, s in copies.items()},
            )
            for name, copies in checkpoints.items()
        ),
    )


WHOLE = {"host": "sealed", "peers": "committed"}


@pytest.mark.parametrize(
    ("view", "step", "certain"),
    [
        (view_of(at_100_2=WHOLE, at_200_2=WHOLE), 200, 2),
        (view_of(at_100_2=WHOLE, at_200_2={"host": "sealed", "peers": "arriving"}), 100, 2),
        (view_of(at_100_2=WHOLE, at_200_2={"host": "sealed", "disk": "committed"}), 100, 2),
        (view_of(at_100_2=WHOLE, at_300_1=WHOLE), 100, 2),
        (view_of(at_100_2={"peers": "committed"}, at_200_2={"host": "sealed"}), 100, 1),
    ],
)
def test_the_newest_that_this_attempt_committed_there_counts(
    view: View, step: int, certain: int
) -> None:
    found = peer_survival(view, 2, PLACED.node_losses)
    assert found is not None
    assert (found.tier, found.step, found.attempt) == ("peers", step, 2)
    assert found.certain == certain
    assert found.chances == (
        PLACED.node_losses.whole if certain == 2 else PLACED.node_losses.copies
    )


@pytest.mark.parametrize(
    "view",
    [
        view_of(),
        view_of(at_100_1=WHOLE),
        view_of(at_100_2={"host": "sealed", "peers": "arriving"}),
        view_of(at_100_2={"host": "sealed", "disk": "committed"}),
    ],
)
def test_nothing_counts_before_the_first_commit_of_this_attempt(view: View) -> None:
    assert peer_survival(view, 2, PLACED.node_losses) is None


ARRIVING = {"host": "sealed", "peers": "arriving"}


@pytest.mark.parametrize(
    ("view", "deleted"),
    [
        (view_of(at_100_2=WHOLE, at_200_2=ARRIVING), []),
        (view_of(at_100_2=WHOLE, at_200_2=WHOLE), [100]),
        (view_of(at_50_2=WHOLE, at_100_2=WHOLE, at_200_2=ARRIVING), [50]),
        (view_of(at_100_2={**WHOLE, "disk": "committed"}, at_200_2=ARRIVING), []),
    ],
    ids=["the newest there", "a newer one is there", "an older one", "this node's disk has it"],
)
def test_memory_keeps_its_part_of_the_newest_copy_on_peers(view: View, deleted: list[int]) -> None:
    """Else one lost node would cost the checkpoint, while a newer one is being sent."""
    found = plan_eviction(view, "host", need_bytes=1, free_bytes=0)
    assert [each.checkpoint.step for each in found.deletions] == deleted


def test_memory_gives_that_up_where_peers_fail_or_shared_storage_has_it() -> None:
    view = view_of(at_100_2=WHOLE, at_200_2=ARRIVING)
    failing = replace(view, failing=frozenset({"peers"}))
    assert plan_eviction(failing, "host", need_bytes=1, free_bytes=0).missing_bytes == 0
    view = view_of(at_100_2={**WHOLE, "disk": "committed"}, at_200_2=ARRIVING)
    *tiers, disk = view.tiers
    shared = replace(disk, survives=survives(TierKind.FILE, shared=True))
    stored = replace(view, tiers=(*tiers, shared))
    assert plan_eviction(stored, "host", need_bytes=1, free_bytes=0).missing_bytes == 0
