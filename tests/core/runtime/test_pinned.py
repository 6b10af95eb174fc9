"""The device layer: without CUDA it does nothing; with it, every error of the runtime is raised."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import pytest
import torch

from tierfall.core.runtime import pinned

SIZE = 1 << 20


class FakeRuntime:
    """Stands for ``torch.cuda.cudart()``: answers with given error codes and keeps what it was asked."""

    def __init__(self, *, register: int = 0, unregister: int = 0) -> None:
        self.register = register
        self.unregister = unregister
        self.calls: list[tuple[object, ...]] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls.append(("register", address, size, flags))
        return self.register

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        return self.unregister

    def cudaGetErrorString(self, code: int) -> str:
        return {1: "invalid argument", 2: "out of memory"}[code]


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(pinned, "_clear_last_error", lambda: calls.append("cleared"))
    return calls


def use(monkeypatch: pytest.MonkeyPatch, runtime: FakeRuntime) -> None:
    monkeypatch.setattr(pinned, "cuda_available", lambda: True)
    monkeypatch.setattr(pinned, "_cudart", lambda: runtime)


def test_without_cuda_nothing_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the CUDA runtime was touched")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "cudart", refuse)
    assert not pinned.cuda_available()
    pinned.synchronize()
    lock = pinned.lock_pages(4096, SIZE)
    assert (lock.locked, lock.reason) == (False, "no CUDA device")
    lock.release()


def test_refused_lock_says_why_and_leaves_no_error_behind(
    monkeypatch: pytest.MonkeyPatch, cleared: list[str]
) -> None:
    runtime = FakeRuntime(register=2)
    use(monkeypatch, runtime)
    lock = pinned.lock_pages(8192, SIZE)
    assert not lock.locked
    assert "CUDA error 2 (out of memory)" in lock.reason
    assert "ulimit -l" in lock.reason
    assert cleared == ["cleared"]
    lock.release()
    assert [call[0] for call in runtime.calls] == ["register"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_locked_range_is_pinned_for_torch_and_takes_copies() -> None:
    mapping = mmap.mmap(-1, SIZE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    assert not tensor.is_pinned()
    lock = pinned.lock_pages(tensor.data_ptr(), SIZE)
    assert lock.locked, lock.reason
    assert tensor.is_pinned()
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
    tensor.copy_(source, non_blocking=True)
    pinned.synchronize()
    assert torch.equal(tensor, source.cpu())
    lock.release()
    assert not tensor.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_refusal_by_the_real_runtime_does_not_hit_the_next_kernel() -> None:
    mapping = mmap.mmap(-1, SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    first = pinned.lock_pages(address, SIZE)
    second = pinned.lock_pages(address, SIZE)
    assert first.locked
    assert not second.locked
    assert "CUDA error" in second.reason
    assert float(torch.ones(8, device="cuda").add_(1).sum()) == 16.0
    first.release()
