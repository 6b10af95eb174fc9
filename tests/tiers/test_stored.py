"""A tier over a backend: how a checkpoint becomes real and is taken apart, in which order, and what is fenced."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

from tests.faults import Fault, FaultKind, Faulty, Operation
from tests.memory_backend import MemoryBackend
from tierfall.backends.wrappers import Wrapper
from tierfall.core.format.decided import DecidedList
from tierfall.core.format.documents import Spliced
from tierfall.core.format.records import (
    Attempt,
    Commit,
    Geometry,
    KnownTier,
    Lineage,
    Manifest,
    NamedFile,
    TierRecord,
)
from tierfall.core.types.backend import StoredObject
from tierfall.core.types.errors import (
    BackendError,
    FencedError,
    IntegrityError,
    KeyExistsError,
    UnreachableError,
)
from tierfall.core.types.keys import COMMIT_NAME
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.tiers.run_files import Documents
from tierfall.tiers.stored import StoredTier

SHARD = Shard(0, 1)
STEM = "rank-00000-of-00001"
IMAGE = b"image" * 100
NOTHING = DecidedList()
CUT = Geometry(image_bytes=len(IMAGE), data_start=100, chunk_bytes=4096)


def attempt(number: int = 1, identity: str = "a") -> Attempt:
    return Attempt(
        run="run", number=number, id=identity * 32, node=f"n{number}", pid=number, wall_time_s=0.0
    )


def commit_of(step: int, number: int = 1, identity: str = "a") -> Commit:
    return Commit(
        lineage=Lineage(
            run="run",
            checkpoint=CheckpointId(step, number),
            attempt_id=identity * 32,
            ordinal=step,
            started_from=None,
        ),
        world_size=1,
        files=(
            NamedFile(name=f"{STEM}.safetensors", bytes=len(IMAGE), digest=None),
            NamedFile(name=f"{STEM}.json", bytes=8, digest="sha256:" + "0" * 64),
        ),
        nodes=("n",),
        wall_time_s=1.0,
    )


def manifest_of(step: int, number: int = 1) -> Manifest:
    return Manifest(
        lineage=commit_of(step, number).lineage,
        shard=SHARD,
        image_bytes=CUT.image_bytes,
        data_start=CUT.data_start,
        chunk_bytes=CUT.chunk_bytes,
        digests=("xxh3-128:" + "0" * 32,) * CUT.chunk_count,
        structure="",
        pieces=Spliced(b"[]"),
    )


def tier_on(backend: object, name: str = "nvme") -> StoredTier:
    return StoredTier(name=name, run="run", backend=backend)  # type: ignore[arg-type]


@pytest.fixture
def disk() -> MemoryBackend:
    return MemoryBackend("disk")


@pytest.fixture
def tier(disk: MemoryBackend) -> StoredTier:
    tier = tier_on(disk)
    tier.marker.write(TierRecord(run="run", id="a" * 32, shared=None, wall_time_s=0.0, others={}))
    tier.fence.create(attempt())
    return tier


def keys(disk: MemoryBackend, prefix: str = "") -> list[str]:
    found = [stored.key.removeprefix("run/") for stored in disk.scan("run/")]
    return [key for key in found if key.startswith(prefix)]


def put(disk: MemoryBackend, key: str, data: bytes) -> None:
    with disk.create(f"run/{key}") as writer:
        writer.write(0, memoryview(data))
        writer.publish()


def write_image(tier: StoredTier, step: int, number: int = 1) -> None:
    id = CheckpointId(step, number)
    writer = tier.create_shard(id, SHARD, CUT, Spliced(b"[]"))
    writer.write_chunks(0, 0, memoryview(IMAGE))
    assert writer.finish(manifest_of(step, number)) == ()
    tier.write_manifest(id, SHARD, b"manifest")


def commit(tier: StoredTier, step: int, number: int = 1) -> None:
    write_image(tier, step, number)
    tier.commit(commit_of(step, number), attempt=attempt(number))


def steps(tier: StoredTier) -> list[str]:
    listing = tier.list()
    assert listing.error is None
    return [str(copy.id) for copy in listing.copies]


# Becoming real ---------------------------------------------------------------------------------------


def unsynced(disk: MemoryBackend, keys: str, times: int = 1) -> Faulty:
    """A disk where the fsync of the folder fails after objects of that name became visible."""
    fault = Fault(kind=FaultKind.UNSYNCED, operation=Operation.PUBLISH, keys=keys, times=times)
    return Faulty(disk, seed=0, plan=[fault])


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_record_whose_last_fsync_failed_is_believed_once_it_was_written_anew(
    disk: MemoryBackend, times: int
) -> None:
    faulty = unsynced(disk, f"*/{COMMIT_NAME}", times)
    tier = tier_on(faulty)
    write_image(tier, 1)
    with pytest.raises(BackendError, match="may not survive a power cut"):
        tier.commit(commit_of(1), attempt=attempt())
    assert tier.is_committed(CheckpointId(1, 1)), "it is visible"
    for _ in range(times):
        with suppress(BackendError):
            tier.commit(commit_of(1), attempt=attempt())
            break
    assert len(faulty.injected) == times
    assert faulty.cut_power() == ()
    assert steps(tier) == ["1@1"]


def test_after_a_failed_sync_a_record_is_put_there_anew(disk: MemoryBackend) -> None:
    """Another sync may say wrongly that all is well."""
    commit(tier_on(disk), 1)
    failing = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.SYNC, error=BackendError)
    faulty = Faulty(disk, seed=0, plan=[failing, *unsynced(disk, "", 0)._plan])
    record = f"run/step-00000001-a0001/{COMMIT_NAME}"
    before = disk._objects[record]
    tier = tier_on(faulty)
    with pytest.raises(BackendError):
        tier.sync_commit(CheckpointId(1, 1))
    assert disk._objects[record] is before
    tier.sync_commit(CheckpointId(1, 1))
    assert disk._objects[record] is not before
    assert disk._objects[record] == before


def test_a_committed_checkpoint_is_never_overwritten(tier: StoredTier) -> None:
    commit(tier, 1)
    other = dataclasses.replace(
        commit_of(1), files=(NamedFile(name="other.safetensors", bytes=1, digest=None),)
    )
    with pytest.raises(IntegrityError, match="committed before with other content"):
        tier.commit(other, attempt=attempt())
    assert tier.read_commit(CheckpointId(1, 1)) == commit_of(1)


def rank_of_two(rank: int, digest: str) -> Commit:
    """The record of a node that has one rank's image."""
    image = NamedFile(name=f"rank-{rank:05d}-of-00002.safetensors", bytes=8, digest=None)
    manifest = NamedFile(
        name=f"rank-{rank:05d}-of-00002.json", bytes=9, digest=f"sha256:{digest * 64}"
    )
    return dataclasses.replace(commit_of(1), world_size=2, files=(image, manifest))


def test_a_node_that_has_the_record_of_other_ranks_commits_its_own(tier: StoredTier) -> None:
    """Ranks may come to another node than before; but what has other content is not touched."""
    tier.commit(rank_of_two(0, "a"), attempt=attempt())
    tier.commit(rank_of_two(1, "b"), attempt=attempt())
    assert tier.read_commit(CheckpointId(1, 1)) == rank_of_two(1, "b")
    with pytest.raises(IntegrityError, match="committed before with other content"):
        tier.commit(rank_of_two(1, "c"), attempt=attempt())
    assert tier.read_commit(CheckpointId(1, 1)) == rank_of_two(1, "b")


# Looking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (FaultKind.FAIL_BEFORE, Operation.SCAN),
        (FaultKind.FAIL_AFTER, Operation.SCAN),
        (FaultKind.FAIL_BEFORE, Operation.STAT),
        (FaultKind.FAIL_BEFORE, Operation.READ),
        (FaultKind.FAIL_AFTER, Operation.READ),
    ],
)
def test_whatever_does_not_answer_is_in_the_listing_as_an_error(
    kind: FaultKind, operation: Operation, tier: StoredTier, disk: MemoryBackend
) -> None:
    """Half a listing would be taken for all that there is."""
    for step in (1, 2, 3):
        commit(tier, step)
    listing = tier_on(Faulty(disk, seed=0, plan=[Fault(kind=kind, operation=operation)])).list()
    if listing.error is None:  # one record of several was not read
        assert operation is Operation.READ
        assert [copy.id.step for copy in listing.copies] == [1, 2, 3]
        assert [type(copy.unread) for copy in listing.copies].count(UnreachableError) == 1
        return
    assert isinstance(listing.error, UnreachableError)
    assert listing.copies == ()


def test_a_checkpoint_that_is_dropped_while_it_is_listed_is_not_there(
    tier: StoredTier, disk: MemoryBackend
) -> None:
    commit(tier, 1)
    commit(tier, 2)

    class Dropping(MemoryBackend):
        def read_into(self, key: str, offset: int, view: memoryview) -> None:
            if key.endswith("step-00000001-a0001/commit.json"):
                tier.delete(CheckpointId(1, 1), attempt=None, known=NOTHING)
            super().read_into(key, offset, view)

    racing = Dropping("disk")
    racing.store.objects = disk.store.objects
    assert steps(tier_on(racing)) == ["2@1"]


def test_what_is_committed_while_it_is_listed_is_whole(
    tier: StoredTier, disk: MemoryBackend
) -> None:
    """A folder that grows while it is read may show the commit record, and not the image that came before."""
    commit(tier, 1)

    class Growing(MemoryBackend):
        scans = 0

        def scan(self, prefix: str) -> Iterator[StoredObject]:
            self.scans += 1
            for stored in super().scan(prefix):
                if self.scans > 1 or not stored.key.endswith(".safetensors"):
                    yield stored

    growing = Growing("disk")
    growing.store.objects = disk.store.objects
    (copy,) = tier_on(growing).list().copies
    assert copy.damage is None


# Attempts --------------------------------------------------------------------------------------------


def test_a_writer_that_was_stopped_within_a_commit_looks_for_a_newer_attempt_again(
    tier: StoredTier, disk: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer start may have collected the images that its record names: it must not tell that it has committed."""
    commit(tier, 1)
    write_image(tier, 2)
    monkeypatch.setattr("tierfall.tiers.stored.FENCE_VALID_S", 0.0)
    real = Documents.create

    def create(documents: Documents, key: str, data: bytes) -> None:
        if key.endswith("commit.json"):
            tier_on(disk).fence.create(attempt(2, "b"))
        real(documents, key, data)

    monkeypatch.setattr(Documents, "create", create)
    with pytest.raises(FencedError, match=r"attempt 1 .* attempt 2"):
        tier.commit(commit_of(2), attempt=attempt())


def test_a_number_that_another_process_took_fences_too(tier: StoredTier) -> None:
    with pytest.raises(FencedError, match="belongs to process 1 on n1"):
        tier.fence.check(attempt(1, "b"))


def test_two_that_take_a_number_at_once_fence_one_of_them(disk: MemoryBackend) -> None:
    class Racing(MemoryBackend):
        def create(self, key: str, **options: object) -> object:  # type: ignore[override]
            if key.endswith("a0001.json") and not self.store.objects:
                tier_on(disk).fence.create(attempt(1, "b"))
                self.store.objects = disk.store.objects
            return super().create(key, **options)  # type: ignore[arg-type]

    with pytest.raises(FencedError, match="was taken by another process just now"):
        tier_on(Racing("disk")).fence.check(attempt())


def test_a_newer_record_that_is_damaged_stops_commits_until_it_is_removed(
    tier: StoredTier, disk: MemoryBackend
) -> None:
    write_image(tier, 1)
    put(disk, "attempts/a0007.json", b"")
    with pytest.raises(
        IntegrityError, match=r"a0007\.json.*it may belong to a newer start.*remove that"
    ):
        tier.commit(commit_of(1), attempt=attempt())
    assert steps(tier) == []
    disk.delete("run/attempts/a0007.json")
    tier.commit(commit_of(1), attempt=attempt())
    assert steps(tier) == ["1@1"]


@pytest.mark.parametrize("data", [b"", attempt(5).encode()])
def test_a_process_writes_its_own_record_anew_where_it_has_seen_it_whole(
    tier: StoredTier, disk: MemoryBackend, data: bytes
) -> None:
    put(disk, "attempts/a0001.json", data)
    commit(tier, 1)
    assert tier.fence.read(1) == attempt()
    tier_on(disk).fence.create(attempt(2, "b"))
    with pytest.raises(FencedError):
        tier.fence.check(attempt())


def test_a_damaged_record_that_may_be_of_another_start_stops_commits(disk: MemoryBackend) -> None:
    put(disk, "attempts/a0001.json", b"")
    tier = tier_on(disk)  # it was away at open
    with pytest.raises(IntegrityError, match=r"a0001\.json.*it may belong to another start"):
        tier.fence.check(attempt())
    with pytest.raises(KeyExistsError):
        tier.fence.create(attempt())


def test_a_fence_that_cannot_be_read_stops_the_commit(disk: MemoryBackend) -> None:
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.SCAN, keys="run/attempts/*")
    tier = tier_on(Faulty(disk, seed=0, plan=[fault]))
    write_image(tier, 1)
    with pytest.raises(UnreachableError):
        tier.commit(commit_of(1), attempt=attempt())
    assert steps(tier) == []


class TakenMeanwhile(Wrapper):
    """A disk where a newer attempt begins just before call number ``at``; ``deleted`` are the calls that delete after
    that."""

    def __init__(self, disk: MemoryBackend, at: int) -> None:
        super().__init__(disk)
        self._disk, self._left = disk, at
        self.deleted: list[str] = []

    def _count(self, *deleted: str) -> None:
        self._left -= 1
        if self._left == 0:
            tier_on(self._disk).fence.create(attempt(2, "b"))
        elif self._left < 0:
            self.deleted += deleted[:1]

    def stat(self, key: str) -> StoredObject:
        self._count()
        return super().stat(key)

    def scan(self, prefix: str) -> Iterator[StoredObject]:
        self._count()
        return super().scan(prefix)

    def delete(self, key: str) -> None:
        self._count(key)
        super().delete(key)

    def delete_some(self, keys: Sequence[str]) -> Sequence[str]:
        """Remove one."""
        self._count(keys[0])
        super().delete(keys[0])
        return keys[1:]

    def discard_unfinished(self, prefix: str) -> int:
        self._count(prefix)
        return super().discard_unfinished(prefix)


@pytest.mark.parametrize("act", ["delete", "discard", "discard_unfinished"])
def test_an_attempt_that_was_followed_deletes_nothing(disk: MemoryBackend, act: str) -> None:
    """A newer attempt that begins at any moment of a deletion ends it: the next request is not made any more."""
    moments = 0
    for at in range(1, 60):
        disk._objects.clear()
        tier_on(disk).fence.create(attempt())
        commit(tier_on(disk), 1)
        tier_on(disk).write_latest(CheckpointId(1, 1))
        if act == "discard":
            disk.delete(f"run/step-00000001-a0001/{COMMIT_NAME}")
        taken = TakenMeanwhile(disk, at)
        calls = {
            "delete": lambda tier: tier.delete(
                CheckpointId(1, 1), attempt=attempt(), known=NOTHING
            ),
            "discard": lambda tier: tier.discard(CheckpointId(1, 1), attempt=attempt()),
            "discard_unfinished": lambda tier: tier.discard_unfinished(attempt=attempt()),
        }
        try:
            calls[act](tier_on(taken))
        except FencedError:
            moments += 1
        assert taken.deleted == [], f"it began before call {at}"
        if 2 not in tier_on(disk).fence.numbers():
            break
    assert moments >= 1
    assert at < 59


def test_nothing_is_deleted_where_a_newer_attempt_could_not_be_looked_for(
    tier: StoredTier, disk: MemoryBackend
) -> None:
    commit(tier, 1)
    fault = Fault(kind=FaultKind.FAIL_BEFORE, operation=Operation.SCAN, keys="run/attempts/*")
    with pytest.raises(UnreachableError):
        tier_on(Faulty(disk, seed=0, plan=[fault])).delete(
            CheckpointId(1, 1), attempt=attempt(), known=NOTHING
        )
    assert steps(tier) == ["1@1"]


# Going -----------------------------------------------------------------------------------------------


def test_latest_goes_on_to_the_next_when_what_it_names_goes(tier: StoredTier) -> None:
    for step in (1, 2, 3):
        commit(tier, step)
        tier.write_latest(CheckpointId(step, 1))
    tier.delete(CheckpointId(1, 1), attempt=None, known=NOTHING, next_latest=CheckpointId(2, 1))
    assert tier.latest.read() == CheckpointId(3, 1)
    tier.delete(CheckpointId(3, 1), attempt=None, known=NOTHING, next_latest=CheckpointId(2, 1))
    assert tier.latest.read() == CheckpointId(2, 1)
    tier.delete(CheckpointId(2, 1), attempt=None, known=NOTHING)
    assert tier.latest.read() is None


def test_latest_never_comes_to_name_what_has_gone_meanwhile(tier: StoredTier) -> None:
    """Two drops under way at once: the one that was planned first may be carried out last."""
    for step in (1, 2):
        commit(tier, step)
    tier.write_latest(CheckpointId(2, 1))
    tier.delete(CheckpointId(1, 1), attempt=None, known=NOTHING)
    tier.delete(CheckpointId(2, 1), attempt=None, known=NOTHING, next_latest=CheckpointId(1, 1))
    assert tier.latest.read() is None


# How attempts began -----------------------------------------------------------------------------------


def begun(tier: StoredTier) -> list[tuple[int, str | None]]:
    """Name the attempts that are known to have committed something here, and what each went on from."""
    return [
        (start.attempt, None if start.started_from is None else str(start.started_from))
        for start in tier.list().starts
    ]


@pytest.mark.parametrize("kind", [FaultKind.FAIL_BEFORE, FaultKind.DISK_FULL])
def test_a_commit_counts_though_how_its_attempt_began_is_not_recorded(
    disk: MemoryBackend, kind: FaultKind
) -> None:
    """It is recorded before the checkpoint goes, by whichever process drops it."""
    operation = Operation.PUBLISH if kind is FaultKind.FAIL_BEFORE else Operation.WRITE
    plan = [Fault(kind=kind, operation=operation, keys="*/lineage/*", times=None)]
    commit(tier_on(Faulty(disk, seed=0, plan=plan)), 1)
    later = tier_on(disk)
    assert (steps(later), begun(later)) == (["1@1"], [])
    later.delete(CheckpointId(1, 1), attempt=None, known=NOTHING)
    assert (steps(later), begun(later)) == ([], [(1, None)])


def test_a_checkpoint_stays_while_how_its_attempt_began_cannot_be_recorded(
    disk: MemoryBackend,
) -> None:
    plan = [
        Fault(
            kind=FaultKind.FAIL_BEFORE, operation=Operation.PUBLISH, keys="*/lineage/*", times=None
        )
    ]
    tier = tier_on(Faulty(disk, seed=0, plan=plan))
    commit(tier, 1)
    with pytest.raises(UnreachableError):
        tier.delete(CheckpointId(1, 1), attempt=None, known=NOTHING)
    assert steps(tier_on(disk)) == ["1@1"]


def test_an_attempt_whose_id_tierfall_does_not_make_names_no_file(disk: MemoryBackend) -> None:
    tier = tier_on(disk)
    odd = dataclasses.replace(attempt(), id="../../x")
    line = dataclasses.replace(commit_of(1).lineage, attempt_id=odd.id)
    write_image(tier, 1)
    tier.commit(dataclasses.replace(commit_of(1), lineage=line), attempt=odd)
    assert steps(tier) == ["1@1"]
    assert keys(disk, "lineage") == []


# Read once -------------------------------------------------------------------------------------------


def test_a_record_that_was_written_anew_is_read_anew() -> None:
    """By whoever repairs it, or damages it, however long it is."""
    disk = MemoryBackend("disk")
    tier = tier_on(disk)
    commit(tier, 1)
    key = "step-00000001-a0001/commit.json"
    whole = bytes(disk.store.objects[f"run/{key}"])
    assert tier.list().copies[0].damage is None
    for damaged in (whole.replace(b'"ordinal":1', b'"ordinal":2'), whole[:-9], whole + b"x"):
        put(disk, key, damaged)
        assert isinstance(tier.list().copies[0].damage, IntegrityError)
    put(disk, key, whole)
    assert tier.list().copies[0].damage is None


class ReplacedMeanwhile(Wrapper):
    """Another process replaces a document between the ``stat`` and the read of one that reads it."""

    def __init__(self, inner: MemoryBackend, newer: bytes) -> None:
        super().__init__(inner)
        self._newer: bytes | None = newer

    def stat(self, key: str) -> StoredObject:
        found = self._inner.stat(key)
        if self._newer is not None:
            newer, self._newer = self._newer, None
            Documents("disk", "run", self._inner).replace(key, newer)
        return found


def test_a_tier_record_that_another_rank_replaces_meanwhile_is_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = TierRecord(run="run", id="a" * 32, shared=None, wall_time_s=0.0, others={})
    pfs = KnownTier(id="b" * 32, place="/pfs", shared=True)
    new = dataclasses.replace(old, shared=False, others={"pfs": pfs})
    disk = MemoryBackend()
    StoredTier(name="disk", run="run", backend=disk).marker.write(old, again=False)
    tier = StoredTier(name="disk", run="run", backend=ReplacedMeanwhile(disk, new.encode()))
    assert tier.marker.write(old, again=False) == new
    assert not caplog.records
