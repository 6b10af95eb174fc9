"""A tier that does not answer holds up ``open``, or a restore from another tier, for no longer than its bound."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.stuck_tier import StuckTier
from tierfall.backends.posix import system
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import load_config
from tierfall.core.runtime.buffers import BufferPool, begin_filling, end_filling
from tierfall.core.types.errors import RestoreError, UnreachableError
from tierfall.setup import tiers as stores

LONG_S = 60.0


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least time that a tier has to answer is short here."""
    monkeypatch.setattr(stores, "ANSWER_S", 1.0)


@pytest.fixture
def silent_store() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


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


def silent(name: str, endpoint: str) -> dict[str, Any]:
    options = {"endpoint_url": endpoint, "key": "a", "secret": "b"}
    return {
        "name": name, "kind": "object", "url": f"s3://bucket/{name}", "options": options, "max_wait": "1s",
    }  # fmt: skip


def state(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((64,), step)}


def test_stores_that_never_answer_end_open_within_their_bound(
    tmp_path: Path, silent_store: str, short: None, caplog: pytest.LogCaptureFixture
) -> None:
    with tierfall.open(config(tmp_path)) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
    tiers = [silent(f"s3-{number}", silent_store) for number in range(3)]
    began_s = time.monotonic()
    with tierfall.open(config(tmp_path, *tiers)) as ckpt:
        assert time.monotonic() - began_s < LONG_S / 2  # the libraries wait for minutes
        assert "tier s3-2 has not answered" in caplog.text
        there = state(0)
        with pytest.raises(RestoreError, match="could not be read and may hold something newer"):
            ckpt.restore(there)
        report = ckpt.restore(there, tier="disk")
        assert report is not None
        assert report.step == 1
        assert bool((there["x"] == 1).all())


def test_a_restore_from_a_fast_tier_does_not_wait_for_a_worker_that_hangs_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, hangs = threading.Event(), threading.Event()
    scandir = os.scandir

    def hang(*args: Any) -> Any:
        if "tierfall-r-pfs" in threading.current_thread().name:
            hangs.set()
            gate.wait(LONG_S)
        return scandir(*args)

    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs")}
    ckpt = tierfall.open(config(tmp_path, pfs))
    try:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
        monkeypatch.setattr(os, "scandir", hang)
        ckpt.save(2, state(2)).wait("disk")
        assert hangs.wait(LONG_S)
        there = state(0)
        began_s = time.monotonic()
        assert ckpt.restore(there, step=1, tier="disk") is not None
        assert time.monotonic() - began_s < LONG_S / 2
        assert bool((there["x"] == 1).all())
    finally:
        gate.set()
        ckpt.close()


def test_a_mount_that_hangs_for_everyone_is_not_looked_at_and_never_counts_as_empty(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "max_wait": "1s"}
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


def test_opened_too_late_is_closed(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, closed = threading.Event(), threading.Event()
    opened = stores._open_backend

    def slow(tier: Any, *, read_only: bool) -> Any:
        if tier.name != "pfs":
            return opened(tier, read_only=read_only)
        gate.wait(LONG_S)
        backend = opened(tier, read_only=read_only)
        close = backend.close
        monkeypatch.setattr(backend, "close", lambda: (close(), closed.set()))
        return backend

    monkeypatch.setattr(stores, "_open_backend", slow)
    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "max_wait": "1s"}
    loaded = load_config(config(tmp_path, pfs))
    found, errors = stores.open_stores(loaded, "r")
    assert list(found) == ["disk"]
    assert isinstance(errors["pfs"], UnreachableError)
    gate.set()
    assert closed.wait(LONG_S)
    found["disk"].close()


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
    made["tiers"][1] |= {"max_wait": "1s", **near}
    return made


def large(step: float) -> dict[str, torch.Tensor]:
    return {"x": torch.full((8192,), step)}


def save_large(made: dict[str, Any], *steps: int) -> None:
    with tierfall.open(made) as ckpt:
        ckpt.restore(large(0))
        for step in steps:
            ckpt.save(step, large(step), block=True)


@pytest.mark.parametrize("what", ["", ".safetensors"])
@pytest.mark.parametrize("compress", [{}, {"compress": {"codec": "zstd"}}])
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
    made["tiers"][1]["max_wait"] = "1s"
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


def test_a_tier_that_never_ends_an_fsync_ends_open_within_its_bound(
    tmp_path: Path, short: None, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    made = near_and_far(tmp_path)
    save_large(made, 1)
    hanging.hang("sync")
    began_s = time.monotonic()
    with tierfall.open(made) as ckpt:
        assert time.monotonic() - began_s < LONG_S / 2
        assert "tier disk: what was found there may not survive a power cut" in caplog.text
        state = large(0)
        assert ckpt.restore(state, unreachable="ignore").step == 1
        assert bool((state["x"] == 1).all())
        hanging.gate.set()


@pytest.mark.parametrize("at", ["open", "read"])
@pytest.mark.parametrize("tiers", ["near and far", "near"])
def test_a_file_system_that_hangs_in_a_read_of_the_page_cache_does_not_hold_a_restore(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, at: str, tiers: str
) -> None:
    """A network mount asks its server when a file is opened, and may have dropped a page when it is read. What it
    answers too late is wrong here, and changes nothing."""
    gate, returned = threading.Event(), threading.Event()
    if at == "read":
        monkeypatch.setattr(system, "never_waits", lambda descriptor: False)

    def late(
        backend: PosixBackend, key: str, offset: int, end: int, views: Iterable[memoryview]
    ) -> bool:
        if backend.place != str(tmp_path / "disk") or not offset:
            return False
        try:
            if at == "open":
                assert gate.wait(LONG_S)
            for view in views:
                assert gate.wait(LONG_S)
                view[:] = b"\xee" * view.nbytes
        finally:
            returned.set()
        return True

    monkeypatch.setattr(PosixBackend, "read_cached", late)
    made = near_and_far(tmp_path) | {"chunk": "128KiB"}
    made["tiers"][0]["capacity"] = "4MiB"
    made["tiers"] = made["tiers"] if tiers == "near and far" else made["tiers"][:2]

    def larger(step: float) -> dict[str, torch.Tensor]:  # what is shorter goes through buffers
        return {"x": torch.full((1 << 17,), step)}

    with tierfall.open(made) as ckpt:
        ckpt.restore(larger(0))
        ckpt.save(1, larger(1), block=True)
    with tierfall.open(made) as ckpt:
        there = larger(0)
        began_s = time.monotonic()
        if tiers == "near":
            with pytest.raises(RestoreError, match="tier disk has not answered"):
                ckpt.restore(there)
        else:
            report = ckpt.restore(there)
            assert any("disk has not answered" in f.reason for f in report.fallbacks)
        assert time.monotonic() - began_s < LONG_S / 2
        before = there["x"].clone()
        gate.set()
        assert returned.wait(LONG_S)
        assert bool((there["x"] == before).all())
        assert tiers == "near" or bool((there["x"] == 1).all())


def test_memory_that_a_late_read_fills_is_not_lent_again() -> None:
    pool = BufferPool(bytes=4096, count=1)
    with pool.lend_view(4096) as view:
        begin_filling(view)
    with pool.lend_view(4096) as other:
        assert other.obj is not view.obj
    end_filling(view)
    pool.release()


@pytest.mark.parametrize("call", ["create", "publish", "read_into", "scan", "sync"])
def test_a_tier_that_is_there_and_does_not_answer_a_call_of_open_does_not_hold_it(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As a store does that lists its objects, and accepts writes that it never answers."""
    pfs = {"name": "pfs", "kind": "file", "path": str(tmp_path / "pfs"), "max_wait": "1s"}
    stuck = StuckTier(tmp_path / "pfs", monkeypatch)
    stuck.hang_in(call)
    try:
        began_s = time.monotonic()
        with tierfall.open(config(tmp_path, pfs, max_wait="0.5s"), fresh=True) as ckpt:
            ckpt.save(1, state(1)).wait("disk", LONG_S)
        assert time.monotonic() - began_s < LONG_S / 2
    finally:
        stuck.gate.set()


def test_a_tier_that_hangs_while_its_device_is_looked_up_is_unreachable(
    tmp_path: Path, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is empty, as an unmounted one: "could not look" is not taken for "nothing there"."""
    tight = config(tmp_path, max_wait="1s")
    with tierfall.open(tight) as ckpt:
        ckpt.restore(state(0))
        ckpt.save(1, state(1), block=True)
    shutil.rmtree(tmp_path / "disk")
    gate = threading.Event()
    monkeypatch.setattr(
        "tierfall.setup.tier_identity.device_of", lambda tier: gate.wait(LONG_S) and None
    )
    try:
        began_s = time.monotonic()
        with tierfall.open(tight) as ckpt, pytest.raises(RestoreError, match="disk"):
            ckpt.restore(state(0))
        assert time.monotonic() - began_s < LONG_S / 2
    finally:
        gate.set()
