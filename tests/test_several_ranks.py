"""Ranks open, restore and close together: what stops one of them stops all, soon, with its name in the error."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import (
    SOON_S,
    Opener,
    close_all,
    kill_all,
    restore_all,
    stop_before_any_flush,
)
from tests.rank_kit import config_of
from tests.steps import blank, files_below, state_of, wait_until
from tests.stuck_tier import StuckTier
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.types import keys
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    FlushError,
    RanksError,
    StepError,
    TierfallError,
    UnreachableError,
)
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.setup import tiers as stores
from tierfall.setup.opened_tiers import OpenedTiers
from tierfall.tiers.host import HostTier
from tierfall.tiers.run_files import Fence


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


def test_ranks_that_come_to_where_others_were_keep_their_images_and_flush_none(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    with network(["b", "a"]) as again:
        swapped = Opener(tmp_path, again)
        swapped.place_of = {0: 1, 1: 0}
        both = swapped.all_open()
        reports = on_all([lambda c=c: c.drain(SOON_S) for c in both])  # type: ignore[misc]
        assert [report.left for report in reports] == [(), ()]
        close_all(both)
    assert not list(tmp_path.glob("*/nvme/run/step-*"))
    assert len(list(tmp_path.glob("*/memory/run/*/*.image"))) == 2
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        states: list[dict[str, Any]] = [{"w": torch.zeros(4), "rng": None} for _ in both]
        restore_all(both, states)
        close_all(both)
    assert [float(state["w"][0]) for state in states] == [0.0, 1.0], "each where it was"


def test_a_start_with_fewer_ranks_saves_at_once_and_to_every_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with network(["a", "a"]) as both:
        opener = Opener(tmp_path, both)
        opener.place_of = {0: 0, 1: 0}
        stop_before_any_flush(opener, monkeypatch)
    tiers = [
        {**tier, "flush": {"every": 1000}} if tier["kind"] == "file" else tier
        for tier in opener.config(0).model_dump(mode="json", exclude_unset=True)["tiers"]
    ]
    config = {"run": "run", "max_wait": "10s", "interval": {"every": 1000}, "tiers": tiers}
    with tierfall.open(config) as ckpt:
        state: dict[str, Any] = {"w": torch.full((4,), -1.0), "rng": None}
        report = ckpt.restore(state, skip=["w"])
        assert report is not None
        assert report.step == 1
        with pytest.raises(StepError, match="it can be restored"):
            ckpt.pin(1)
        assert ckpt.maybe_save(2, state) is not None, "as no rank flushes what another has saved"
        assert ckpt.maybe_save(3, state) is None
        assert ckpt.drain(SOON_S).left == ()
        found = {c.step: sorted(c.copies) for c in ckpt.checkpoints()}
        assert found == {2: ["far", "host", "nvme"]}
    assert not list(tmp_path.glob("0/memory/run/*/*.image")), "what was found is let go"


def test_images_of_ranks_that_are_gone_are_named_if_they_end_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has adopted the memory of two; its files are removed, and no tier takes a copy."""
    with network(["a", "a"]) as both:
        opener = Opener(tmp_path, both)
        opener.place_of = {0: 0, 1: 0}
        stop_before_any_flush(opener, monkeypatch)
    config = opener.config(0, max_wait="500ms", on_error="raise")
    create = PosixBackend.create

    def refuse_images(self: PosixBackend, key: str, **options: Any) -> Any:
        if key.endswith(".safetensors"):
            raise UnreachableError("nobody answers")
        return create(self, key, **options)

    monkeypatch.setattr(PosixBackend, "create", refuse_images)
    ckpt = tierfall.open(config.model_dump(mode="json", exclude_unset=True))
    for image in (tmp_path / "0/memory").rglob("*.image"):
        image.unlink()
    with pytest.raises(FlushError, match="lost, as no other tier has it: 1@1"):
        ckpt.close()


class WithShared(Opener):
    """Each second save comes to a tier that all nodes see, too."""

    def config(self, rank: int, **more: Any) -> Config:
        shared = {"name": "pfs", "kind": "file", "path": str(self.folder / "pfs"), "shared": True}
        tiers = super().config(rank).model_dump(mode="json", exclude_unset=True)["tiers"]
        every = {"flush": {"every": 2}}
        return super().config(rank, tiers=[*tiers[:2], {**shared, **every}], **more)


def fails_for(rank: int, owner: type, method: str, error: BaseException, patch: Any) -> None:
    """Let a method fail on one rank."""
    real = getattr(owner, method)

    def stand_in(self: HostTier | OpenedTiers, *args: Any, **more: Any) -> Any:
        own = self._shard.rank if isinstance(self, HostTier) else self.ranks.topology.rank
        if own == rank:
            raise error
        return real(self, *args, **more)

    patch.setattr(owner, method, stand_in)


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HostTier, "check_room"),
        (OpenedTiers, "_write_record"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("bad", [0, 1])
def test_what_keeps_one_rank_from_opening_is_raised_by_all_soon(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, bad: int
) -> None:
    before = set(threading.enumerate())
    fails_for(bad, owner, method, BackendError("no such luck"), monkeypatch)
    began = time.monotonic()
    outcomes = opener.all_open()
    assert time.monotonic() - began < SOON_S
    assert type(outcomes[bad]) is BackendError
    assert "no such luck" in str(outcomes[1 - bad])
    if (
        bad or method != "_write_record"
    ):  # rank 0 takes the attempt for all: what it says there needs no name
        assert isinstance(outcomes[1 - bad], RanksError)
        assert f"rank {bad}: no such luck" in str(outcomes[1 - bad])
    assert opener.left() == [True, True]
    monkeypatch.undo()
    left = {t for t in threading.enumerate() if "run" in t.name} - before
    assert not left, "no thread of a start that failed"


def test_a_rank_that_leaves_after_its_upload_holds_up_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not the first rank of its node, which writes the commit record."""
    nodes, gate, uploaded = ("a", "a", "b", "b"), threading.Event(), threading.Event()

    def config(node: str) -> Config:
        place = tmp_path / node
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme"), "shared": False},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers})

    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **words: Any) -> Any:
        if "rank-00003-of" in key and key.endswith(".safetensors"):
            assert gate.wait(SOON_S)
        return real(self, key, **words)

    monkeypatch.setattr(PosixBackend, "create", create)
    with network(nodes) as ranks:
        calls = [
            lambda r=r, n=n: Checkpointer(config(n), ranks=r)  # type: ignore[misc]
            for r, n in zip(ranks, nodes, strict=True)
        ]
        opened = on_all(calls)
        opened[1].subscribe(lambda event: event["kind"] == "flush_done" and uploaded.set())
        handles = [one.save(1, {"w": torch.full((4,), float(r))}) for r, one in enumerate(opened)]
        for handle in handles:
            handle.captured(SOON_S)
        assert uploaded.wait(SOON_S)
        kill_all(opened[1:2])
        gate.set()
        handles[0].wait("nvme", timeout=SOON_S)
        kill_all([opened[0], *opened[2:]])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("had_an_id", [False, True])
def test_a_tier_that_one_rank_cannot_reach_is_left_out_by_all(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, had_an_id: bool, who: int
) -> None:
    if had_an_id:  # an earlier start gave it one, which the other rank reads
        close_all(opener.all_open(fresh=True))
    real = stores._open_backend

    def open_backend(tier: FileTierConfig | ObjectTierConfig, *, read_only: bool) -> Backend:
        if str(tier.place) == str(tmp_path / str(who) / "far"):
            raise UnreachableError("nobody answers")
        return real(tier, read_only=read_only)

    monkeypatch.setattr(stores, "_open_backend", open_backend)
    both = opener.all_open(fresh=True)
    try:
        handles = [ckpt.save(1, {"w": torch.ones(4), "rng": None}) for ckpt in both]
        for handle in handles:
            assert handle.tiers == ("nvme",)
            handle.wait("nvme", SOON_S)
        assert [r.left for r in on_all([lambda c=c: c.drain(SOON_S) for c in both])] == [(), ()]  # type: ignore[misc]
    finally:
        close_all(both)


@pytest.mark.parametrize("hung", [pytest.param("pfs", marks=pytest.mark.torture), "1/nvme"])
def test_a_tier_that_hangs_in_the_cleanup_of_open_is_left_out_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hung: str
) -> None:
    """The abandoned cleanup may go on later, and would delete what other ranks are just writing."""
    monkeypatch.setattr(stores, "ANSWER_S", 1.0)
    tier = Path(hung).name
    other = {"pfs": "nvme", "nvme": "pfs"}[tier]
    stuck = StuckTier(tmp_path / hung, monkeypatch)

    def train(steps: tuple[int, int], **how: Any) -> list[int | None]:
        """Restore, save two steps, and return the steps that the ranks continued from."""
        with network(["a", "b"]) as ranks:
            both = WithShared(tmp_path, ranks).all_open(max_wait="2s")
            assert all(isinstance(ckpt, Checkpointer) for ckpt in both), both
            states = [{"w": torch.zeros(4)} for _ in both]
            pairs = zip(both, states, strict=True)
            found = on_all([lambda c=c, s=s: c.restore(s, **how) for c, s in pairs])  # type: ignore[misc]
            for step in steps:
                saved = [{"w": torch.full((4,), float(step))} for _ in both]
                handles = [ckpt.save(step, of) for ckpt, of in zip(both, saved, strict=True)]
            for handle in handles:
                handle.wait(other, timeout=SOON_S)
            used = [tier in open_run_of(ckpt).session.stores for ckpt in both]
            assert used == [not stuck.hung.is_set() or stuck.gate.is_set()] * 2
            close_all(both)
        return [None if report is None else report.step for report in found]

    assert train((1, 2)) == [None, None]
    stuck.hang_in("discard_unfinished")
    try:
        assert train((3, 4), unreachable="ignore") == [2, 2]
        assert f"goes on without tier {tier}" in caplog.text
    finally:
        stuck.gate.set()
    assert train((5, 6)) == [4, 4]


def test_a_rank_whose_coordinator_has_stopped_holds_up_no_close(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor whoever waits for what that rank has saved."""
    ckpts = opener.all_open()
    broken = ckpts[1]._session
    handle = ckpts[1].save(1, {"w": torch.ones(4)})

    def step(now_s: float) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(broken.coordinator, "step", step)
    broken.call_soon(int)
    wait_until(lambda: broken.workers.failure is not None, "the coordinator to stop")
    with pytest.raises(TierfallError, match="a fault of ours"):
        handle.wait(timeout=SOON_S)
    began = time.monotonic()
    outcomes = on_all([one.close for one in ckpts])
    assert outcomes[0] is None
    assert "a fault of ours" in str(outcomes[1])
    assert time.monotonic() - began < SOON_S / 2


# Commands and rules ----------------------------------------------------------------------------------


def ranks_save(both: list[Any]) -> None:
    for rank, ckpt in enumerate(both):
        ckpt.save(1, {"w": torch.full((4,), float(rank)), "rank": rank, "all": "same"})
    on_all([c.drain for c in both])


# begin ---------------------------------------------------------------------------------------------------


def test_all_ranks_begin_or_none(ranks: list[Ranks], tmp_path: Path) -> None:
    opener = Opener(tmp_path, ranks)
    close_all(opener.all_open())
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        assert on_all([c.begin for c in both]) == [None, None]
        ranks_save(both)
        close_all(both)
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        errors = on_all([c.begin for c in both])
        assert all(isinstance(error, StepError) for error in errors), errors
        close_all(both)


LOSSES = {1: 0.9, 2: 0.2, 3: 0.5, 4: 0.2, 5: 0.8, 6: 0.7}


def steps_on(folder: Path) -> list[int]:
    found = (keys.parse_step_folder(path.name) for path in (folder / "run").iterdir())
    return sorted(id.step for id in found if id is not None)


def test_rank_0s_metrics_decide_for_all(tmp_path: Path) -> None:
    """Rank 1 measured otherwise: by its losses, other steps would be the best."""
    config = config_of(tmp_path, shared={"retain": {"best": {"metric": "loss", "count": 2}}})
    with network(["a", "a"]) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, ranks=r) for r in ranks])  # type: ignore[misc]
        for step, loss in LOSSES.items():
            saves = [
                lambda c=ckpt, m=measured, s=step: c.save(  # type: ignore[misc]
                    s, {"w": torch.ones(4), "rng": None}, metrics={"loss": m}
                )
                for ckpt, measured in zip(opened, (loss, -loss), strict=True)
            ]
            for handle in on_all(saves):
                handle.wait("shared", timeout=SOON_S)
        assert on_all([one.close for one in opened]) == [None, None]
    assert steps_on(tmp_path / "shared") == [2, 4, 6]


def refuse_records(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Let nothing be created on a tier, as credentials that may only read."""
    take = Fence.create

    def taken(self: Fence, attempt: Any) -> None:
        if self._backend.place == str(place):
            raise AccessDeniedError(f"create a record in {place}: 403")
        take(self, attempt)

    monkeypatch.setattr(Fence, "create", taken)


class Nodes(Opener):
    """Two nodes, each with a disk of its own, and an archive that they mount in places of their own."""

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(rank)
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme"), "shared": False},
            {"name": "archive", "kind": "file", "path": str(place / "archive"), "shared": False},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})


def test_what_one_rank_may_not_write_to_is_written_to_by_none(
    tmp_path: Path, ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    with network(["a", "b"]) as first:
        nodes = Nodes(tmp_path, first)
        checkpointers = nodes.all_open()
        states = [state_of(1), state_of(1)]
        pairs = list(zip(checkpointers, states, strict=True))
        on_all([lambda c=c, s=s: c.save(1, s, block=True) for c, s in pairs])  # type: ignore[misc]
        close_all(checkpointers)
    for node in (0, 1):
        shutil.rmtree(tmp_path / f"{node}/nvme")
        shutil.rmtree(tmp_path / f"{node}/memory")  # both nodes were replaced
    before = [files_below(tmp_path / f"{node}/archive") for node in (0, 1)]
    refuse_records(monkeypatch, tmp_path / "1/archive")
    checkpointers = Nodes(tmp_path, ranks).all_open()
    states = [blank(), blank()]
    reports = restore_all(checkpointers, states)
    assert [report.step for report in reports] == [1, 1]
    pairs = list(zip(checkpointers, states, strict=True))
    handles = on_all([lambda c=c, s=s: c.save(2, s, block=True) for c, s in pairs])  # type: ignore[misc]
    assert {handle.tiers for handle in handles} == {("nvme",)}
    close_all(checkpointers)
    after = [files_below(tmp_path / f"{node}/archive") for node in (0, 1)]
    assert [set(files) - set(old) for files, old in zip(after, before, strict=True)] in (
        [set(), set()],
        [set(), {"run/attempts/a0002.json"}],
        [{"run/attempts/a0002.json"}, set()],
    )
