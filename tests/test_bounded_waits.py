"""A tier that does not answer holds up ``open``, or a restore from another tier, for no longer than its bound."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.stuck_tier import StuckTier
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.runtime.buffers import BufferPool, begin_filling, end_filling
from tierfall.core.types.errors import RestoreError
from tierfall.setup import tiers as stores

LONG_S = 60.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time that a tier has to answer is short here."""
    monkeypatch.setattr(stores, "ANSWER_S", 0.5)


def config(root: Path, *more: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / "memory"), "capacity": "1MiB"},
            {"name": "disk", "kind": "file", "path": str(root / "disk")},
            *more,
        ],
        **keys,
    }


def state(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((64,), step)}


def test_a_mount_that_hangs_for_everyone_is_not_looked_at_and_never_counts_as_empty(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "max_wait": "0.5s"}
    with tierfall.open(config(tmp_path, pfs)) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
    gate, stat = threading.Event(), os.stat

    def hang(path: Any, *args: Any, **keys: Any) -> Any:
        if str(path) == str(tmp_path / "pfs"):
            gate.wait(LONG_S)
        return stat(path, *args, **keys)

    monkeypatch.setattr(os, "stat", hang)
    try:
        config_of_both = config(tmp_path, pfs)
        with tierfall.open(config_of_both) as ckpt:
            with pytest.raises(RestoreError, match="pfs"):
                ckpt.restore(state(0))
            assert ckpt.restore(state(0), unreachable="ignore") is not None
    finally:
        gate.set()


# A tier that stops answering in the middle ------------------------------------------------------------


class Hanging:
    """Reads, or fsyncs, of files below a folder begin, and return once the gate is opened."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.gate, self.returned = threading.Event(), threading.Event()
        self.root = root
        self.hung = 0
        self._patch = patch
        patch.setattr(PosixBackend, "read_cached", lambda *args: False)

    def hang(self, method: str, *, only: str = "") -> None:
        real = getattr(PosixBackend, method)

        def late(backend: PosixBackend, key: str, *args: Any) -> Any:
            if backend.place != str(self.root) or only not in key:
                return real(backend, key, *args)
            self.hung += 1
            assert self.gate.wait(LONG_S)
            try:
                return real(backend, key, *args)
            finally:
                self.returned.set()

        self._patch.setattr(PosixBackend, method, late)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    hanging = Hanging(tmp_path / "disk", monkeypatch)
    yield hanging
    hanging.gate.set()


def near_and_far(root: Path, **near: Any) -> dict[str, Any]:
    far = {"name": "far", "kind": "file", "path": str(root / "far"), "shared": True}
    made = config(root, far, chunk="4KiB")
    made["tiers"][1] |= {"max_wait": "0.5s", **near}
    return made


def large(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((8192,), step)}


def save_large(made: dict[str, Any], *steps: int) -> None:
    with tierfall.open(made) as ckpt:
        ckpt.restore(large(0))
        for step in steps:
            ckpt.save(step, large(step), block=True)


@pytest.mark.parametrize(
    ("what", "compress"), [("", {}), (".safetensors", {"compress": {"codec": "zstd"}})]
)
def test_a_restore_goes_on_from_the_next_tier_where_one_stops_answering(
    tmp_path: Path, short: None, hanging: Hanging, what: str, compress: dict[str, Any]
) -> None:
    """Also what it answers once it is too late changes nothing."""
    made = near_and_far(tmp_path, **compress)
    save_large(made, 1, 2)
    with tierfall.open(made) as ckpt:
        hanging.hang("read_into", only=f"step-00000002-a0001/{'rank-' if what else ''}")
        state = large(0)
        began_s = time.monotonic()
        report = ckpt.restore(state)
        assert time.monotonic() - began_s < LONG_S / 2
        assert report.step == 2
        assert bool((state["x"] == 2).all())
        assert hanging.hung
        assert any("has not answered" in str(f) for f in report.fallbacks)
        hanging.gate.set()
        assert hanging.returned.wait(LONG_S)
        for step in (1, 2):
            there = large(0)
            assert ckpt.restore(there, step=step).step == step
            assert bool((there["x"] == step).all())
        assert bool((state["x"] == 2).all())


def test_a_restore_from_one_tier_alone_that_stops_answering_says_so_within_its_bound(
    tmp_path: Path, short: None, hanging: Hanging
) -> None:
    made = config(tmp_path, chunk="4KiB")
    made["tiers"][1]["max_wait"] = "0.5s"
    save_large(made, 1)
    with tierfall.open(made) as ckpt:
        hanging.hang("read_into", only=".safetensors")
        state = large(0)
        began_s = time.monotonic()
        with pytest.raises(RestoreError, match="has not answered"):
            ckpt.restore(state)
        assert time.monotonic() - began_s < LONG_S / 2
        hanging.gate.set()
        assert hanging.returned.wait(LONG_S)
        assert ckpt.restore(state).step == 1
        assert bool((state["x"] == 1).all())


@pytest.mark.parametrize("call", ["publish", "scan"])
def test_a_tier_that_is_there_and_does_not_answer_a_call_of_open_does_not_hold_it(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As a store does that lists its objects, and accepts writes that it never answers."""
    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "max_wait": "0.5s"}
    stuck = StuckTier(tmp_path / "pfs", monkeypatch)
    stuck.hang_in(call)
    try:
        began_s = time.monotonic()
        with tierfall.open(config(tmp_path, pfs, max_wait="0.5s"), fresh=True) as ckpt:
            ckpt.save(1, state(1)).wait("disk", LONG_S)
        assert time.monotonic() - began_s < LONG_S / 2
    finally:
        stuck.gate.set()


def test_memory_that_a_late_read_fills_is_not_lent_again() -> None:
    pool = BufferPool(bytes=4096, count=1)
    with pool.lend_view(4096) as view:
        begin_filling(view)
    with pool.lend_view(4096) as other:
        assert other.obj is not view.obj
    end_filling(view)
    pool.release()
