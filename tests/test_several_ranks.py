"""Ranks open, restore and close together: what stops one of them stops all, soon, with its name in the error."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import tierfall
from tests.core.ranks.threads import network, on_all
from tests.open_ranks import SOON_S, Opener, close_all, restore_all, stop_before_any_flush
from tests.steps import memory_of, wait_until
from tests.stuck_tier import StuckTier
from tierfall.cli.app import app
from tierfall.config import Config, FileTierConfig, ObjectTierConfig
from tierfall.core.format.catalog import Listing
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.scheduler.group.messages import Ordinal
from tierfall.core.types.backend import Backend
from tierfall.core.types.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    ConfigError,
    LockError,
    RanksError,
    RestoreError,
    UnreachableError,
)
from tierfall.ops.drain import drain
from tierfall.run import group_commands
from tierfall.run.checkpointer import Checkpointer, open_run_of
from tierfall.run.saver import Saver
from tierfall.session.opened_tiers import OpenedTiers
from tierfall.session.session import Session
from tierfall.setup import tiers as stores
from tierfall.tiers.host import HostTier
from tierfall.tiers.stored import StoredTier


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


def test_a_part_that_one_process_cannot_complete_stays_and_drain_leaves_it_alone(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    files = {path: path.stat().st_size for path in tmp_path.rglob("*.json")}
    drained = drain(opener.config(0), SOON_S)
    assert (drained.done, drained.memory_kept) == ((), True)
    assert all("is not known here: set it" in problem for problem in drained.problems)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*.json")} == files
    with Checkpointer(opener.config(0), run="run") as alone:
        assert alone.restore({"w": torch.zeros(4), "rng": None}) is None
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        states = [{"w": torch.zeros(4), "rng": None} for _ in both]
        reports = restore_all(both, states)
        assert [report.sources[0].tier for report in reports] == ["host", "host"]
        assert [state["w"][0].item() for state in states] == [0.0, 1.0]  # type: ignore[index, union-attr]
        close_all(both)


def test_ranks_that_come_to_where_others_were_flush_their_images_under_their_names(
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
    images = sorted(tmp_path.glob("*/nvme/run/step-00000001-a0001/*.safetensors"))
    assert [str(p.relative_to(tmp_path))[0] for p in images] == ["0", "1"]
    for rank, image in enumerate(images):
        assert image.name == f"rank-{rank:05}-of-00002.safetensors", "each where its node is"
        assert tierfall.load(image)["w"].tolist() == [float(rank)] * 4
    assert not list(tmp_path.glob("*/memory/run/*/*.arena"))


class WithShared(Opener):
    """Each second save comes to a tier that all nodes see, too."""

    def config(self, rank: int, **more: Any) -> Config:
        shared = {"name": "pfs", "kind": "file", "path": str(self.folder / "pfs"), "shared": True}
        tiers = super().config(rank).model_dump(mode="json", exclude_unset=True)["tiers"]
        every = {"flush": {"every": 2}}
        return super().config(rank, tiers=[*tiers[:2], {**shared, **every}], **more)


def test_what_only_another_ranks_node_has_is_no_reason_to_restore_an_older_step(
    ranks: list[Ranks], tmp_path: Path
) -> None:
    """Ranks come to each other's nodes, and cannot send each other what they have: nothing is left behind."""
    both = WithShared(tmp_path, ranks).all_open()
    restore_all(both, [{"w": torch.zeros(4)} for _ in both])
    for step in (1, 2, 3):
        handles = [c.save(step, {"w": torch.full((4,), float(step))}) for c in both]
        for handle in handles:
            handle.wait("nvme", timeout=SOON_S)
    on_all([c.drain for c in both])
    close_all(both)
    with network(["a", "b"]) as again:
        swapped = WithShared(tmp_path, again)
        swapped.place_of = {0: 1, 1: 0}
        both = swapped.all_open()
        for error in restore_all(both, [{"w": torch.zeros(4)} for _ in both]):
            assert isinstance(error, RestoreError)
            assert "3@1" in str(error)
            assert "init_process_group" in str(error)
        close_all(both)


def test_memory_that_cannot_be_read_stays_and_the_rest_is_adopted(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    memory, other = (memory_of(opener.config(rank)) for rank in (0, 1))
    shutil.copy(other / "slot-0.arena", memory / "slot-1.arena")
    (memory / "slot-2.arena").write_bytes(b"nothing of ours")
    with Checkpointer(opener.config(0), run="run") as alone:
        assert "slot-2.arena" in caplog.text
        states = [{"w": torch.zeros(4), "rng": None}]
        with pytest.raises(RestoreError, match="differ"):  # each rank's w was its own
            alone.restore(states[0])
        alone.drain(SOON_S)
        assert [sorted(c.tiers) for c in alone.checkpoints()] == [["far", "host", "nvme"]]
    folder = tmp_path / "0/nvme/run/step-00000001-a0001"
    assert [tierfall.load(p)["w"][0].item() for p in sorted(folder.glob("*.safetensors"))] == [0, 1]
    assert [path.name for path in memory.glob("*.arena")] == ["slot-2.arena"]


def test_a_slot_that_a_living_process_owns_is_not_adopted(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    memory, other = (memory_of(opener.config(rank)) for rank in (0, 1))
    shutil.copy(other / "slot-0.arena", memory / "slot-1.arena")
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(memory / "slot-1.lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        with pytest.raises(LockError, match=f"process {owner.pid}.*slot-1.lock"):
            Checkpointer(opener.config(0), run="run")
        owner.communicate("\n")
    with Checkpointer(opener.config(0), run="run") as alone:
        assert alone.drain(SOON_S).left == ()


def test_what_one_node_has_of_a_checkpoint_is_looked_at_and_is_not_damage(
    opener: Opener, tmp_path: Path
) -> None:
    both = opener.all_open()
    handles = [ckpt.save(1, {"w": torch.ones(4), "rng": None}) for ckpt in both]
    for handle in handles:
        handle.wait(timeout=SOON_S)
    close_all(both)
    path = tmp_path / "tiers.yaml"
    path.write_text(yaml.safe_dump(opener.config(0).model_dump(mode="json", exclude_none=True)))
    for command in (["verify"], ["show", "1"]):
        done = CliRunner().invoke(app, [*command, "--config", str(path)])
        assert done.exit_code == 0, done.output
        assert "does not name" not in done.output
    image = tmp_path / "0/nvme/run/step-00000001-a0001/rank-00000-of-00002.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    assert "DAMAGED" in CliRunner().invoke(app, ["verify", "--config", str(path)]).output


def fails_for(rank: int, owner: type, method: str, error: BaseException, patch: Any) -> None:
    """Let a method fail on one rank: that whose folder is in what the method's object is about."""
    real = getattr(owner, method)

    def stand_in(self: Any, *args: Any, **more: Any) -> Any:
        if _rank_of(self, *args) == rank:
            raise error
        return real(self, *args, **more)

    patch.setattr(owner, method, stand_in)


def _rank_of(self: Any, *args: Any) -> int:
    if isinstance(self, HostTier):
        return self._shard.rank
    opened = self if isinstance(self, OpenedTiers) else args[isinstance(self, Saver)]
    rank: int = opened.ranks.topology.rank
    return rank


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HostTier, "attach"),
        (OpenedTiers, "_write_record"),
        (HostTier, "allocate_now"),
        (Session, "__init__"),
        (Saver, "__init__"),
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


def test_a_second_checkpointer_of_one_rank_is_refused_on_all(
    opener: Opener, tmp_path: Path
) -> None:
    alone = Checkpointer(opener.config(1), run="run")
    try:
        outcomes = opener.all_open()
    finally:
        alone.close()
    assert isinstance(outcomes[1], ConfigError)
    assert "rank 1: open: a second Checkpointer" in str(outcomes[0])
    assert opener.left() == [True, True]


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


class EachByItsPath(WithShared):
    """Each rank reaches the tier that all nodes see by a path of its own."""

    def config(self, rank: int, **more: Any) -> Config:
        sections = super().config(rank).model_dump(mode="json", exclude_unset=True)["tiers"]
        sections[-1]["path"] = str(self.folder / f"pfs-{rank}")
        return Opener.config(self, rank, tiers=sections, **more)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_cannot_list_a_shared_tier_as_it_starts_owes_it_nothing_that_is_there(
    ranks: list[Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, who: int
) -> None:
    (tmp_path / "pfs-0").mkdir()
    (tmp_path / "pfs-1").symlink_to(tmp_path / "pfs-0")
    both = EachByItsPath(tmp_path, ranks).all_open()
    for step in (1, 2):
        for handle in [c.save(step, {"w": torch.full((4,), float(step))}) for c in both]:
            handle.wait("nvme", timeout=SOON_S)
    on_all([c.drain for c in both])
    close_all(both)
    real = StoredTier.list

    def list_tier(store: StoredTier) -> Listing:
        if store.place.endswith(f"pfs-{who}"):
            return Listing(tier=store.name, error=UnreachableError("nobody answers"))
        return real(store)

    with network(["a", "b"]) as again:
        with monkeypatch.context() as context:
            context.setattr(StoredTier, "list", list_tier)
            both = EachByItsPath(tmp_path, again).all_open()
        states = [{"w": torch.zeros(4)} for _ in both]
        assert [report.step for report in restore_all(both, states)] == [2, 2]
        for step in (3, 4):
            for handle in [c.save(step, {"w": torch.full((4,), float(step))}) for c in both]:
                handle.wait(timeout=SOON_S)
        reports = on_all([lambda c=c: c.drain(SOON_S) for c in both])  # type: ignore[misc]
        assert [report.left for report in reports] == [(), ()]
        for ckpt in both:
            there = {c.step: c.tiers.get("pfs") for c in ckpt.checkpoints()}
            assert (there[2], there[4]) == ("committed", "committed")
        close_all(both)


class Stubborn:
    """A part of a state that can be saved, and may refuse what was saved."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.refuses:
            raise ValueError("not this")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_part_that_one_rank_cannot_load_fails_the_restore_of_all(
    opener: Opener, bad: int
) -> None:
    both = opener.all_open()
    for ckpt in both:
        ckpt.save(1, {"part": Stubborn(refuses=False), "rng": None})
    began = time.monotonic()
    outcomes = on_all(
        [
            lambda r=r, c=c: c.restore({"part": Stubborn(refuses=r == bad), "rng": None})  # type: ignore[misc]
            for r, c in enumerate(both)
        ]
    )
    assert time.monotonic() - began < SOON_S
    for outcome in outcomes:
        assert isinstance(outcome, RestoreError)
        assert "not this" in str(outcome)
        assert "THE STATE IS HALF FILLED" in str(outcome)
    assert f"rank {bad}: " in str(outcomes[1 - bad])
    good = on_all(
        [lambda c=c: c.restore({"part": Stubborn(refuses=False), "rng": None}) for c in both]  # type: ignore[misc]
    )
    assert [report.step for report in good] == [1, 1], "the ranks are still in step"
    assert [ckpt._lineage.attempt.number for ckpt in both] == [2, 2]
    close_all(both)


def test_a_restore_of_a_part_on_one_rank_alone_is_refused_on_all(opener: Opener) -> None:
    both = opener.all_open()
    for ckpt in both:
        ckpt.save(1, {"w": torch.ones(4), "rng": None})
    outcomes = on_all(
        [
            lambda o=o, c=c: c.restore({"w": torch.zeros(4), "rng": None}, only=o)  # type: ignore[misc]
            for o, c in zip([None, ["w"]], both, strict=True)
        ]
    )
    assert all("rank 1 restored a part where rank 0 restored all" in str(o) for o in outcomes)
    close_all(both)


def test_ranks_of_which_one_alone_has_saved_go_back_as_one_attempt(opener: Opener) -> None:
    both = opener.all_open()
    state = {"w": torch.ones(4), "rng": None}
    for ckpt in both:
        ckpt.save(1, state)
    assert [r.step for r in on_all([lambda c=c: c.restore(state) for c in both])] == [1, 1]  # type: ignore[misc]
    both[1].save(2, state)
    assert [r.step for r in on_all([lambda c=c: c.restore(state) for c in both])] == [1, 1]  # type: ignore[misc]
    assert [ckpt._lineage.attempt.number for ckpt in both] == [3, 3]
    close_all(both)


def test_an_earlier_failure_that_save_raises_costs_no_rank_its_place(opener: Opener) -> None:
    both = opener.all_open(on_error="raise")
    raised: list[BaseException] = []
    for step in range(1, 5):
        for rank, ckpt in enumerate(both):
            extra = print if step == 1 and rank == 1 else None  # a function cannot be saved
            try:
                ckpt.save(step, {"w": torch.ones(4), "extra": extra, "rng": None})
            except CaptureError as error:
                raised.append(error)
        for ckpt in both:  # rank 0 hears of it before its next save
            open_run_of(ckpt).finish_capture()
        if step == 1:
            wait_until(lambda: bool(both[0]._session.coordinator.errors), "it is told", SOON_S)
    assert len(raised) == 2, "once on each rank"
    assert [ckpt._lineage.ordinal for ckpt in both] == [4, 4]
    assert [r.left for r in on_all([lambda c=c: c.drain(SOON_S) for c in both])] == [(), ()]  # type: ignore[misc]
    known = [[c.step for c in ckpt.checkpoints() if "far" in c.tiers] for ckpt in both]
    assert known == [[2, 3, 4], [2, 3, 4]]
    close_all(both)


def test_a_close_that_fails_on_one_rank_still_leaves_the_others(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = opener.all_open()
    real = Session.close

    def close(self: Session, **options: Any) -> None:
        real(self, **options)
        if self.ranks.topology.rank == 1:
            raise CapacityError("no room to close")

    monkeypatch.setattr(Session, "close", close)
    began = time.monotonic()
    outcomes = on_all([ckpt.close for ckpt in both])
    assert time.monotonic() - began < SOON_S
    assert outcomes[0] is None
    assert isinstance(outcomes[1], CapacityError)
    assert opener.left() == [True, True]


def test_a_save_that_fails_on_one_rank_keeps_its_line_level_with_what_others_have_counted(
    opener: Opener,
) -> None:
    both = opener.all_open()
    both[0]._session.ranks.message_tree.announce(("ordinal",), Ordinal(ordinal=5).to_json())
    wait_until(
        lambda: all(c._session.coordinator.ledger.least_ordinal == 5 for c in both),
        "all have heard it",
        SOON_S,
    )
    lost = both[0].save(1, {"w": torch.zeros(2), "rng": None})
    with pytest.raises(CaptureError, match="function"):
        both[1].save(1, {"function": print, "rng": None})
    with pytest.raises(CaptureError, match="rank 1"):
        lost.wait(timeout=SOON_S)
    handles = [ckpt.save(2, {"w": torch.zeros(2), "rng": None}) for ckpt in both]
    for handle in handles:
        handle.wait(timeout=SOON_S)
    assert [ckpt.checkpoints()[-1].ordinal for ckpt in both] == [7, 7]
    close_all(both)


def test_a_rank_whose_coordinator_has_stopped_holds_up_no_close(
    opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    ckpts = opener.all_open()
    broken = ckpts[1]._session

    def step(now_s: float) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(broken.coordinator, "step", step)
    broken.call_soon(int)
    wait_until(lambda: broken.workers.failure is not None, "the coordinator to stop")
    began = time.monotonic()
    outcomes = on_all([one.close for one in ckpts])
    assert outcomes[0] is None
    assert "a fault of ours" in str(outcomes[1])
    assert time.monotonic() - began < SOON_S / 2


def test_ranks_whose_time_is_up_still_end_together(
    opener: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    ckpts = opener.all_open()

    def end(rank: int) -> bool:
        time.sleep(0.3 * rank)  # as one may be slower to give up a drain
        return group_commands.finish_commands(ckpts[rank]._session, lambda: 0.0)

    assert on_all([lambda: end(0), lambda: end(1)]) == [True, True]
    assert on_all([one.close for one in ckpts]) == [None, None]
    assert "does not wait for the others" not in caplog.text


@pytest.mark.parametrize("hung", ["pfs", "1/nvme"])
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
