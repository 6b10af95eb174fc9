"""What peer memory survives: the newest checkpoint that is committed there, and who holds its images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tierfall.core.types.values import CheckpointId, CopyState, TierKind, survives
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View
from tierfall.policies.eviction import reason_to_leave_memory
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


SEALED = {"host": "sealed"}
SENT_AGAIN = {"host": "sealed", "peers": "arriving"}


@pytest.mark.parametrize(("newer", "may_go"), [(SEALED, False), (SENT_AGAIN, False), (WHOLE, True)])
def test_an_image_whose_copies_other_nodes_have_lost_stays_in_memory(
    newer: dict[str, str], may_go: bool
) -> None:
    """Step 200 was restored from memory, and 100 is the newest that peer memory has had; a node is lost since, with
    some of its copies."""
    made = view_of(at_100_1=SEALED, at_200_2=newer, at_300_3=SEALED)
    partial = frozenset({("peers", CheckpointId(100, 1))})
    view = replace(made, partial=partial, restored_from=CheckpointId(200, 2), attempt=3)
    old, host = view.checkpoints[0], view.tier("host")
    assert (reason_to_leave_memory(view, old, host, view.on("host")) is not None) == may_go


def test_of_two_images_whose_copies_other_nodes_have_lost_the_restored_one_stays_in_memory() -> (
    None
):
    made = view_of(at_100_1=SEALED, at_200_2=SEALED)
    partial = frozenset({("peers", CheckpointId(100, 1)), ("peers", CheckpointId(200, 2))})
    view = replace(made, partial=partial, restored_from=CheckpointId(200, 2), attempt=3)
    (old, restored), host = view.checkpoints, view.tier("host")
    assert reason_to_leave_memory(view, restored, host, view.on("host")) is None
    assert reason_to_leave_memory(view, old, host, view.on("host")) is not None


def test_before_the_first_save_the_restored_image_stays_in_place_of_one_that_has_lost_copies() -> (
    None
):
    """Host memory has room for two. Nothing of the restored step is on other nodes, as no rule selects it."""
    made = view_of(at_100_1=SEALED, at_200_2=SEALED)
    partial = frozenset({("peers", CheckpointId(100, 1))})
    view = replace(made, partial=partial, restored_from=CheckpointId(200, 2), attempt=3)
    (old, restored), host = view.checkpoints, view.tier("host")
    assert reason_to_leave_memory(view, restored, host, view.on("host")) is None
    assert reason_to_leave_memory(view, old, host, view.on("host")) is not None
