"""Ranks open, restore and close together: what keeps one of them from it ends it for all, soon and by name."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.core.ranks.threads import network, on_all
from tierfall import stores
from tierfall.backends.posix import PosixBackend
from tierfall.checkpointer import Checkpointer, _open
from tierfall.cli.app import app
from tierfall.config import Config, FileTier, ObjectTier
from tierfall.core.contracts import Backend
from tierfall.core.errors import (
    BackendError,
    CapacityError,
    CaptureError,
    ConfigError,
    NotSupportedError,
    RanksError,
    RestoreError,
    UnreachableError,
)
from tierfall.core.ranks.ranks import Ranks
from tierfall.draining import drain
from tierfall.saving import Saver
from tierfall.session import Session
from tierfall.tiers.host import HostTier

SOON_S = 8.0
"""Less than ``max_wait``, and much more than what these calls take."""


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    """Two ranks, each on a node of its own."""
    with network(["a", "b"]) as both:
        yield both


class Opener:
    """Opens one run on all ranks, each with tiers of its own."""

    def __init__(self, folder: Path, ranks: list[Ranks]) -> None:
        self.folder = folder
        self.ranks = ranks
        self.place_of = {0: 0, 1: 1}

    def config(self, rank: int, **more: Any) -> Config:
        place = self.folder / str(self.place_of[rank])
        tiers = [
            {"name": "host", "kind": "host", "folder": str(place / "memory")},
            {"name": "nvme", "kind": "file", "path": str(place / "nvme")},
            {"name": "far", "kind": "file", "path": str(place / "far")},
        ]
        return Config.model_validate({"run": "run", "max_wait": "10s", "tiers": tiers, **more})

    def open(self, rank: int, *, fresh: bool = False, **more: Any) -> Checkpointer:
        config = self.config(rank, **more)
        return Checkpointer(config, run="run", ranks=self.ranks[rank], fresh=fresh)

    def all_open(self, **more: Any) -> list[Any]:
        return on_all([lambda r=r: self.open(r, **more) for r in range(len(self.ranks))])  # type: ignore[misc]

    def left(self) -> list[bool]:
        return [one._post.closed for one in self.ranks]  # type: ignore[union-attr]


@pytest.fixture
def opener(tmp_path: Path, ranks: list[Ranks]) -> Opener:
    return Opener(tmp_path, ranks)


def close_all(checkpointers: list[Checkpointer]) -> None:
    assert on_all([ckpt.close for ckpt in checkpointers]) == [None] * len(checkpointers)


def stop_before_any_flush(opener: Opener, patch: pytest.MonkeyPatch) -> None:
    """Save step 1 on all ranks, and end as a kill does: it is sealed in memory, and nowhere else."""

    real = PosixBackend.create

    def create(self: PosixBackend, key: str, **options: Any) -> Any:
        if not key.endswith(".safetensors"):
            return real(self, key, **options)
        raise UnreachableError(f"{key}: nobody answers")

    with patch.context() as context:
        context.setattr(PosixBackend, "create", create)
        both = opener.all_open()
        for rank, ckpt in enumerate(both):
            ckpt.save(1, {"w": torch.full((4,), float(rank)), "rng": None}).captured(SOON_S)
        deadline = time.monotonic() + SOON_S
        while any(ckpt.checkpoints()[0].tiers.get("host") != "sealed" for ckpt in both):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for ckpt in both:
            ckpt._capturer.close(SOON_S)
            ckpt._session.close(keep_memory=True)
            _open.discard(ckpt)


def test_memory_of_several_ranks_is_refused_to_one_process(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    files = {path: path.stat().st_size for path in tmp_path.rglob("*.json")}
    for call in (
        lambda: Checkpointer(opener.config(0), run="run"),
        lambda: drain(opener.config(0), SOON_S),
    ):
        with pytest.raises(NotSupportedError, match="2 ranks saved, and this is one process"):
            call()
    assert {path: path.stat().st_size for path in tmp_path.rglob("*.json")} == files
    with network(["a", "b"]) as again:
        both = Opener(tmp_path, again).all_open()
        states = [{"w": torch.zeros(4), "rng": None} for _ in both]
        reports = on_all([lambda c=c, s=s: c.restore(s) for c, s in zip(both, states, strict=True)])  # type: ignore[misc]
        assert [report.sources[0].tier for report in reports] == ["host", "host"]
        assert [state["w"][0].item() for state in states] == [0.0, 1.0]  # type: ignore[index, union-attr]
        close_all(both)


def test_ranks_that_come_to_where_others_were_do_not_take_up_their_images(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stop_before_any_flush(opener, monkeypatch)
    with network(["b", "a"]) as again:
        swapped = Opener(tmp_path, again)
        swapped.place_of = {0: 1, 1: 0}
        both = swapped.all_open()
        assert [ckpt.checkpoints() for ckpt in both] == [[], []]
        close_all(both)
    assert not list(tmp_path.glob("*/*/run/step-*/*")), "nobody's image under another's name"


def test_drain_leaves_the_memory_of_several_ranks_of_a_machine_alone(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "run": "run",
            "max_wait": "10s",
            "tiers": [
                {"name": "host", "kind": "host", "folder": str(tmp_path / "memory")},
                {"name": "nvme", "kind": "file", "path": str(tmp_path / "nvme")},
            ],
        }
    )
    with Checkpointer(config, run="run") as ckpt:
        ckpt.save(1, {"w": torch.ones(4), "rng": None}).captured(SOON_S)
        shutil.copy(tmp_path / "memory/run/slot-0.arena", tmp_path / "memory/run/slot-1.arena")
    path = tmp_path / "tiers.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_none=True)))
    done = CliRunner().invoke(app, ["drain", "--config", str(path)])
    assert done.exit_code == 1
    assert "several ranks of run 'run' have left images in memory" in done.output
    assert "slot-1.arena" in done.output
    assert (tmp_path / "memory/run/slot-1.arena").exists()


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
    session = self if isinstance(self, Session) else args[1]
    rank: int = session.ranks.topology.rank
    return rank


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (HostTier, "attach"),
        (Session, "_take"),
        (HostTier, "create_now"),
        (Session, "build"),
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
        bad or method != "_take"
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


def test_a_tier_that_one_rank_cannot_reach_is_left_out_by_all(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = stores._open_backend

    def open_backend(tier: FileTier | ObjectTier, *, read_only: bool) -> Backend:
        if str(tier.place) == str(tmp_path / "1" / "far"):
            raise UnreachableError("nobody answers")
        return real(tier, read_only=read_only)

    monkeypatch.setattr(stores, "_open_backend", open_backend)
    both = opener.all_open(fresh=True)
    try:
        handles = [ckpt.save(1, {"w": torch.ones(4), "rng": None}) for ckpt in both]
        for handle in handles:
            assert handle.tiers == ("nvme",)
            handle.wait("nvme", SOON_S)
        assert all(ckpt.drain(SOON_S).left == () for ckpt in both)
    finally:
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
    assert [ckpt._line.attempt.number for ckpt in both] == [2, 2]
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
    assert [ckpt._line.attempt.number for ckpt in both] == [3, 3]
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
            ckpt._finish_capture()
        deadline = time.monotonic() + SOON_S
        while step == 1 and not both[0]._session.coordinator.errors:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(raised) == 2, "once on each rank"
    assert [ckpt._line.ordinal for ckpt in both] == [4, 4]
    assert all(ckpt.drain(SOON_S).left == () for ckpt in both)
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
