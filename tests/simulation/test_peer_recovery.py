"""A replaced node has its images, and the copies that it keeps, again before the next save: in a world of four nodes,
one loss after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from tests.simulation.many import SHARED_TIER
from tests.simulation.peer_hour import peer_rules
from tests.simulation.peer_watch import PeerWatch
from tests.simulation.peer_world import PEER_TIER, Machine, PeerWorld, StartFailedError
from tests.simulation.world import FakeRegion, commit_in_memory, file_rules
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.flush import worker
from tierfall.core.flush.commits import LOST_WRITES_MAX
from tierfall.core.types.errors import (
    IntegrityError,
    LostWriteError,
    TierfallError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.core.types.view import TierRules
from tierfall.tiers.peers import PeerCache

ONE = CheckpointId(1, 1)


class World(PeerWorld):
    """Four machines, each in a rack of its own, that have saved step 1."""

    def __init__(self, *rules: TierRules, copies: int = 1, last: int = 1) -> None:
        self.copies_made = copies
        machines, chain = (
            [self.machine(n) for n in range(4)],
            (peer_rules(retain_last=last), *rules),
        )
        super().__init__(machines, chain, copies=copies, seed=0)
        self.watch = PeerWatch(self)
        self.save(1)
        assert self.where(ONE) == [copies + 1] * 4

    def machine(self, number: int) -> Machine:
        return Machine(number, slots=1, images=3, copies=self.copies_made, domain=str(number % 4))

    def save(self, step: int) -> None:
        """All ranks save a step, and all that follows from it is done."""
        for rank in self.ranks:
            rank.save(step)
        self.settle(after_each=self.watch.look)

    def replace(self, lost: Iterable[int], *, more: int = 0) -> None:
        """These machines are lost, and others start in their places, and some ``more``."""
        for node in lost:
            self.lose(self.present[node])
        self.crash()
        for node in lost:
            self.present[node] = self.machine(self.present[node].number + 4)
        self.present += [self.machine(100 + number) for number in range(more)]
        self.start()
        self.watch.check_started()

    def where(self, id: CheckpointId) -> list[int]:
        """On how many machines the image of each rank is."""
        found = self.watch._find(id)
        assert found is not None
        return [len(found.holders(rank.shard)) for rank in self.ranks]


def test_an_image_is_brought_back_while_one_of_two_keepers_is_lost() -> None:
    world = World(copies=2)
    _, first, second = world.placement.holders[0]

    def lose(one: int, other: int) -> None:
        world.lose(world.present[first])

    world.on_recovery_request = lose
    with pytest.raises(StartFailedError):
        world.replace([0])
    world.on_recovery_request = lambda one, other: None
    world.crash()
    world.present[first] = world.machine(world.present[first].number + 4)
    world.start()
    world.watch.check_started()
    assert world.started_from == ONE
    assert world.present[second].number < 4


@pytest.mark.parametrize("again", range(3))
def test_an_image_of_which_a_part_arrives_is_not_taken(again: int) -> None:
    world = World()
    keeper = world.placement.holders[2][1]
    requests = 0

    def part(one: int, other: int) -> None:
        nonlocal requests
        requests += 1
        if requests == 3 + again:
            world.wires.parted.add(frozenset((one, other)))

    world.on_recovery_request = part
    world.replace([2])
    assert requests >= 3 + again, "it was parted in the middle"
    assert world.ranks[2].recovered is None
    assert not world.ranks[2].memory.regions
    assert world.started_from == ONE, "it is read from where it is"
    world.wires.heal()
    world.settle(after_each=world.watch.look)
    assert world.present[keeper].number < 4


def refuse_commits(
    patch: pytest.MonkeyPatch, world: World, node: int, error: type[TierfallError], times: int
) -> list[int]:
    """Let commit records of a node fail so often; return the list that each failure is noted in."""
    real, failed = PeerCache.commit, list[int]()

    def commit(self: PeerCache, *arguments: object, **more: object) -> None:
        if self is world.ranks[node].stores[PEER_TIER] and len(failed) < times:
            failed.append(1)
            raise error("on purpose")
        real(self, *arguments, **more)  # type: ignore[arg-type]

    patch.setattr(PeerCache, "commit", commit)
    return failed


def test_copies_that_cannot_be_made_again_cost_none_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    before = world.watch._find(ONE)
    assert before is not None
    world.replace([0])
    failed = refuse_commits(monkeypatch, world, 2, IntegrityError, 1)
    world.settle(after_each=world.watch.look)
    assert failed, "the copies were not made again"
    found = world.watch._find(ONE)
    assert found is not None
    for shard, machines in before.kept.items():
        assert machines - {0} <= found.kept[shard]
    monkeypatch.undo()
    world.save(2)
    world.watch.check_settled()  # with something newer they are gone


def test_a_commit_record_that_is_lost_on_its_way_is_written_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    failed = refuse_commits(monkeypatch, world, 1, LostWriteError, LOST_WRITES_MAX)
    world.save(2)
    assert len(failed) == LOST_WRITES_MAX
    assert world.where(CheckpointId(2, 1)) == [2] * 4


def test_a_node_that_has_nothing_of_the_newest_step_writes_the_next_one_to_storage() -> None:
    """It knows of a step that other nodes keep, and not how large its images are."""

    def silent(one: int, other: int) -> None:
        raise TimeoutError("no answer, on purpose")

    world = World(file_rules(SHARED_TIER, shared=True, retain_last=2), copies=2)
    world.on_recovery_request = silent
    world.replace([0])
    assert world.started_from == ONE
    assert world.ranks[0].recovered is None
    world.save(2)
    next_id = CheckpointId(2, 2)
    assert world.where(next_id) == [3] * 4
    assert next_id in world.records(SHARED_TIER, 0)


def test_a_copy_that_is_sent_again_takes_the_place_of_the_one_before_only_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first try breaks off at its end: the next one deletes nothing before it begins."""
    world = World(copies=2)
    world.replace([0])
    real, failed = worker.publish_image, list[Shard]()

    def publish_image(*arguments: Any, shard: Shard, **more: Any) -> Any:
        if shard.rank == 1 and not failed:
            failed.append(shard)
            raise LostWriteError("on purpose")
        return real(*arguments, shard=shard, **more)

    monkeypatch.setattr(worker, "publish_image", publish_image)
    # The keepers did not answer when they were asked for their record, and this node's own one names others' images.
    monkeypatch.setattr(worker, "_committed_before", lambda task, store: None)
    world.settle(after_each=world.watch.check)
    assert failed, "the copies were not made again"
    assert world.where(ONE) == [3] * 4


@pytest.mark.parametrize("every", [1, 5])
def test_a_start_with_more_nodes_waits_for_no_image_that_a_new_one_does_not_have(
    every: int,
) -> None:
    """Two nodes have saved to their own disks; a third one, with new memory, has no file of that checkpoint."""
    chain = (peer_rules(flush_every=every), file_rules("nvme"))
    machines = [Machine(n, slots=1, images=3, copies=1, domain=str(n)) for n in range(2)]
    world = PeerWorld(machines, chain, copies=1, seed=0)
    for rank in world.ranks:
        rank.save(1)
    world.settle()
    world.crash()
    world.present = [Machine(n, slots=1, images=3, copies=1, domain=str(n)) for n in (10, 11, 12)]
    world.start()
    assert world.started_from == ONE
    world.settle()
    assert not any(rank.door.is_busy for rank in world.ranks)
    for rank in world.ranks:
        rank.save(2)
    world.settle()
    assert all(max(rank.committed("nvme")).step == 2 for rank in world.ranks)


def test_the_step_of_a_start_that_no_rule_selects_is_sent_to_the_other_nodes() -> None:
    machines = [Machine(n, slots=1, images=3, copies=1, domain=str(n)) for n in range(4)]
    world = PeerWorld(machines, [peer_rules(flush_every=5)], copies=1, seed=0)
    for rank in world.ranks:
        rank.save(1)
    world.settle()
    assert not any(rank.committed(PEER_TIER) for rank in world.ranks)
    world.crash()
    world.start()
    world.settle()
    assert all(rank.committed(PEER_TIER) == {ONE} for rank in world.ranks)


@pytest.mark.parametrize(("copies", "more"), [(1, 0), (2, 0), (1, 1), (1, 2)])
@pytest.mark.parametrize("is_on_storage", [True, False])
def test_a_damaged_copy_that_the_node_of_rank_0_has_nothing_of_goes_with_newer_ones(
    copies: int, more: int, *, is_on_storage: bool
) -> None:
    """The image that a node keeps of the older step of two is missing there, and rank 0 is on a new node."""
    storage = [file_rules(SHARED_TIER, shared=True, retain_last=2)] if is_on_storage else []
    world = World(*storage, copies=copies, last=2)
    world.save(2)
    keeper = world.present[world.placement.holders[2][1]]
    kept = [image for image in keeper.kept.images()[0] if image.shard == world.ranks[2].shard]
    (image,) = [image for image in kept if image.commit.lineage.checkpoint == ONE]
    image.path.unlink()
    world.replace([0], more=more)
    assert world.started_from == CheckpointId(2, 1)
    world.save(3)
    world.save(4)
    world.watch.check_settled()


def test_an_image_in_memory_says_once_that_peer_memory_has_it_before_a_handle_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So does one that was brought back, though other nodes have lost copies of it since."""
    world, seen = World(copies=2), list[bool]()
    on_committed = SaveHandle.on_committed

    def look(handle: SaveHandle, tier: str) -> None:
        regions = [region for rank in world.ranks for region in rank.memory.regions]
        seen.append(any(noted for id, noted in notes(regions) if id == CheckpointId(2, 1)))
        on_committed(handle, tier)

    monkeypatch.setattr(SaveHandle, "on_committed", look)
    world.save(2)
    assert seen
    assert all(seen)
    monkeypatch.undo()
    for _ in range(2):
        world.replace([0])
        (region,) = world.ranks[0].memory.regions
        assert notes([region]) == [(CheckpointId(2, 1), True)]
        world.settle(after_each=world.watch.look)
    for rank in world.ranks:
        newest = max(notes(rank.memory.regions))
        assert newest == (CheckpointId(2, 1), True)


def notes(regions: Iterable[FakeRegion]) -> list[tuple[CheckpointId, bool]]:
    """The checkpoints of sealed images, and whether peer memory had committed them."""
    return [
        (commit_in_memory(region.commit()).lineage.checkpoint, region.on_peers)
        for region in regions
        if region.sealed
    ]


def test_a_start_after_a_loss_knows_which_step_was_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two steps that too few nodes have: the commit record of the newer one did not reach all nodes."""
    world = World(copies=2, last=2)
    refuse_commits(monkeypatch, world, 2, UnreachableError, 10**6)
    for rank in world.ranks:
        rank.save(2)
    world.settle(limit_s=60.0, after_each=world.watch.look)
    monkeypatch.undo()
    world.replace([0])
    two = CheckpointId(2, 1)
    assert world.started_from == two, "it is whole in memory"
    for rank in world.ranks:
        few = rank.door.on_few_nodes
        assert few == {(PEER_TIER, ONE): True, (PEER_TIER, two): False}


def test_the_newest_reported_step_stays_though_more_nodes_have_the_one_before() -> None:
    """The older one was sent again after a loss, to other nodes. Memory has room for two images."""
    domains = [str(node) for node in range(6)]
    machines = [Machine(n, slots=1, images=2, copies=2, domain=d) for n, d in enumerate(domains)]
    world = PeerWorld(machines, [peer_rules(retain_last=2)], copies=2, seed=0, max_wait_s=30.0)
    watch = PeerWatch(world)
    save_one_after_a_loss(world, watch)
    for lost in (1, 4):
        world.lose(world.present[lost])
    world.crash()
    for lost in (1, 4):
        domain = world.present[lost].domain
        world.present[lost] = Machine(200 + lost, slots=1, images=2, copies=2, domain=domain)
    world.start()
    watch.check_started()
    for rank in world.ranks:
        rank.ask(3)
    world.settle(limit_s=100.0, after_each=watch.check)
    world.crash()
    world.start()
    watch.check_started()
    assert world.started_from == CheckpointId(2, 2)


def save_one_after_a_loss(world: PeerWorld, watch: PeerWatch) -> None:
    """Save step 1, replace a node by one in another rack, and save step 2."""
    for step, lost in ((1, 0), (2, None)):
        for rank in world.ranks:
            rank.save(step)
        world.settle(after_each=watch.look)
        if lost is not None:
            world.lose(world.present[lost])
            world.crash()
            world.present[lost] = Machine(100, slots=1, images=2, copies=2, domain="2")
            world.start()
            world.settle(after_each=watch.look)
