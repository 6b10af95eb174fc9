"""What peer memory survives: the newest checkpoint that is committed there, and who holds its images."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rules import retained
from tierfall.core.types.values import CheckpointId, CopyState, LossClass, TierKind, survives
from tierfall.core.types.view import CheckpointView, CopyView, TierRules, View
from tierfall.policies.eviction import reason_to_leave_memory
from tierfall.policies.flush import still_owed
from tierfall.policies.forecast import peer_survival
from tierfall.policies.placement import place_copies
from tierfall.policies.retention import plan_drops

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


def owed_to_peers(view: View, step: int) -> View:
    checkpoints = (
        replace(c, owed=frozenset({"peers"}))
        if c.id.step == step and not c.readable_on("peers")
        else c
        for c in view.checkpoints
    )
    return replace(view, checkpoints=tuple(checkpoints))


SEALED = {"host": "sealed"}
SENT_AGAIN = {"host": "sealed", "peers": "arriving"}


@pytest.mark.parametrize(("newer", "may_go"), [(SEALED, False), (SENT_AGAIN, False), (WHOLE, True)])
def test_an_image_whose_copies_other_nodes_have_lost_stays_in_memory(
    newer: dict[str, str], may_go: bool
) -> None:
    """Step 200 was restored from memory, and 100 is the newest that peer memory has had; a node is lost since, with
    some of its copies."""
    made = owed_to_peers(view_of(at_100_1=SEALED, at_200_2=newer, at_300_3=SEALED), 200)
    partial = frozenset({("peers", CheckpointId(100, 1))})
    view = replace(made, partial=partial, restored_from=CheckpointId(200, 2), attempt=3)
    old, host = view.checkpoints[0], view.tier("host")
    assert (reason_to_leave_memory(view, old, host, view.on("host")) is not None) == may_go


@pytest.mark.parametrize("newer", [SEALED, SENT_AGAIN])
@pytest.mark.parametrize("is_owed", [True, False])
def test_what_all_nodes_have_stays_in_memory_until_the_restored_one_is_on_all_of_them(
    newer: dict[str, str], is_owed: bool
) -> None:
    """The image in memory is one of its copies. The restored step is whole; other nodes have a part of it. It
    stays, too, if it is to be sent there; else no save would have room."""
    view = view_of(at_100_1=WHOLE, at_200_1=newer)
    view = owed_to_peers(view, 200) if is_owed else view
    partial = frozenset({("peers", CheckpointId(200, 1))})
    view = replace(view, partial=partial, restored_from=CheckpointId(200, 1), attempt=3)
    host = view.tier("host")
    old, restored = (
        reason_to_leave_memory(view, checkpoint, host, view.on("host"))
        for checkpoint in view.checkpoints
    )
    assert old is None
    assert (restored is None) == is_owed


@pytest.mark.parametrize(("has_few", "may_go"), [(True, False), (False, True)])
def test_what_too_few_nodes_have_takes_the_place_of_no_older_copy(
    has_few: bool, may_go: bool
) -> None:
    """With two copies, a node is lost of which one keeps the only copy that is left of an image."""
    view = view_of(at_100_1=WHOLE, at_200_1={"peers": "committed"}, at_300_3=SEALED)
    few = {("peers", CheckpointId(200, 1)): True} if has_few else {}
    view = replace(view, on_few_nodes=few, restored_from=CheckpointId(200, 1), attempt=3)
    old, host = view.checkpoints[0], view.tier("host")
    assert (reason_to_leave_memory(view, old, host, view.on("host")) is not None) == may_go
    tiers = (replace(t, retain=retained(1) if t.name == "peers" else ()) for t in view.tiers)
    drops = plan_drops(replace(view, tiers=tuple(tiers)), "peers")
    assert {drop.checkpoint.step for drop in drops} == ({100} if may_go else set())


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


@pytest.mark.parametrize("failing", [frozenset(), frozenset({"peers"})])
def test_what_too_few_nodes_have_stays_in_memory_until_a_newer_one_is_on_all_of_its_nodes(
    failing: frozenset[str],
) -> None:
    """A node is lost of two that keep copies, and the restored step is in memory alone. Where peer memory does not
    accept it at present, the newest image goes, as without a loss."""
    made = owed_to_peers(view_of(at_100_1=WHOLE, at_200_1=SEALED), 200)
    few = {("peers", CheckpointId(100, 1)): True}
    restored_id = CheckpointId(200, 1)
    view = replace(made, on_few_nodes=few, failing=failing, restored_from=restored_id, attempt=3)
    host = view.tier("host")
    old, restored = (
        reason_to_leave_memory(view, checkpoint, host, view.on("host"))
        for checkpoint in view.checkpoints
    )
    assert old is None
    assert (restored is not None) == bool(failing)


@pytest.mark.parametrize(
    ("is_old_reported", "is_new_reported", "goes"),
    [(True, True, 100), (True, False, 200), (False, True, 100), (False, False, 100)],
)
def test_of_two_steps_that_too_few_nodes_have_the_newest_that_was_reported_stays_in_memory(
    is_old_reported: bool, is_new_reported: bool, goes: int
) -> None:
    """The newer one was restored, and is to be sent again. Peer memory does not accept it at present, and memory has
    room for two images: one of them goes."""
    made = owed_to_peers(view_of(at_100_1=WHOLE, at_200_2=SENT_AGAIN), 200)
    old, new = CheckpointId(100, 1), CheckpointId(200, 2)
    view = replace(
        made,
        on_few_nodes={("peers", old): is_old_reported, ("peers", new): is_new_reported},
        failing=frozenset({"peers"}),
        restored_from=new,
        attempt=3,
    )
    host = view.tier("host")
    may_go = [
        checkpoint.id.step
        for checkpoint in view.checkpoints
        if reason_to_leave_memory(view, checkpoint, host, view.on("host")) is not None
    ]
    assert may_go == [goes]


@pytest.mark.parametrize("on_store", [False, True])
def test_peer_memory_is_owed_the_newest_step_of_a_start_though_no_rule_selects_it(
    on_store: bool,
) -> None:
    """Unless a store has it: then a lost node does not cost it. All ranks decide it alike, before they restore."""
    found = {"host": "sealed", "store": "committed"} if on_store else SEALED
    made = view_of(at_100_1=found, at_200_1=found)
    tiers = tuple(replace(tier, flush_every=5) for tier in made.tiers)
    store = TierRules(name="store", kind=TierKind.OBJECT, survives=LossClass.SITE, flush_every=5)
    view = replace(made, tiers=(*tiers, store))
    owed = {checkpoint.id.step: still_owed(view, checkpoint) for checkpoint in view.checkpoints}
    assert owed == {100: (), 200: () if on_store else ("peers",)}
