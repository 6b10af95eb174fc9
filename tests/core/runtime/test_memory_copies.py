"""Many copies, and many sums, in one call each: on a CUDA device; and what adds them up without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils import cpp_extension

from tierfall.core.runtime import memory_copies
from tierfall.core.runtime.memory_copies import MemoryCopies, can_copy, compile_kernel
from tierfall.core.runtime.streams import CudaStream
from tierfall.core.sampling import sum_kernel

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SIZES = (1, 7, 8, 16, 4096, (1 << 20) - 1, 1 << 20, (3 << 20) + 5)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("to", ["host", "device"])
@pytest.mark.parametrize("shift", [0, 1, 4, 8])
def test_all_bytes_arrive_and_no_others(to: str, shift: int) -> None:
    device = torch.device("cuda", 0)
    sources = [torch.randint(1, 255, (size + shift,), dtype=torch.uint8) for size in SIZES]
    there = [source.to(device)[shift:] for source in sources]
    room = sum(SIZES) + 64 * len(SIZES)
    memory = torch.zeros(room, dtype=torch.uint8, device=device if to == "device" else "cpu")
    memory = memory if to == "device" else memory.pin_memory()
    starts = np.cumsum([0, *(size + 64 for size in SIZES)])[:-1].astype(np.uint64)
    stream = CudaStream(device)
    if not stream.copies_memory(memory):
        pytest.skip("the driver has no such call")
    copies = MemoryCopies(
        targets=starts + np.uint64(memory.data_ptr()),
        sources=np.array([each.data_ptr() for each in there], dtype=np.uint64),
        sizes=np.array(SIZES, dtype=np.uint64),
        on_device=to == "device",
    )
    stream.wait_for_caller()  # the zeros and the sources are there
    stream.enqueue(lambda: stream.copy_memory(copies)).wait()
    wanted = torch.zeros(room, dtype=torch.uint8)
    for start, source in zip(starts.tolist(), sources, strict=True):
        wanted[start : start + len(source) - shift] = source[shift:]
    assert torch.equal(memory.cpu(), wanted)


@pytest.mark.gpu
@on_gpu
def test_the_sums_of_one_kernel_are_those_of_torch() -> None:
    device = torch.device("cuda", 0)
    tensors = [
        torch.randint(-(1 << 62), 1 << 62, (count,), device=device)
        for count in (1, 31, 33, sum_kernel.BLOCK_WORDS, 3 * sum_kernel.BLOCK_WORDS + 1)
    ]
    addresses = [*map(torch.Tensor.data_ptr, tensors)]
    sums = sum_kernel.add_up(addresses, [*map(len, tensors)], device)
    assert sums is not None
    assert sums.tolist() == [int(tensor.sum()) for tensor in tensors]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("moved", [True, False])
def test_the_host_does_not_wait_for_sums(moved: bool) -> None:
    device = torch.device("cuda", 0)
    tensors = [torch.ones(4096, dtype=torch.int64, device=device) for _ in range(2)]
    addresses = [*map(torch.Tensor.data_ptr, tensors)]
    assert sum_kernel.add_up(addresses, [4096, 2], device) is not None  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)  # cycles: half a second
    sums = sum_kernel.add_up(addresses[::-1] if moved else addresses, [4096, 2], device)
    assert not torch.cuda.current_stream().query(), "the device still sleeps"
    assert sums is not None
    assert sums.tolist() == [4096, 2]


def test_without_a_range_or_a_kernel_there_are_no_sums() -> None:
    assert sum_kernel.add_up([], [], torch.device("cuda", 0)) is None
    assert sum_kernel.add_up([8], [1], torch.device("cpu")) is None


def test_a_kernel_is_compiled_without_a_toolkit_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose torch comes from pip has the driver and the compiler, and no headers."""
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=bool))

    def compiled(source: str, name: str) -> list[str]:
        """As torch's does, it asks for the folders of headers first."""
        return cpp_extension.include_paths("cuda", torch_include_dirs=False)

    monkeypatch.setattr(torch.cuda, "_compile_kernel", compiled)
    assert compile_kernel("", "kernel", torch.device("cuda", 0)) == []
    assert cpp_extension.CUDA_HOME is None


def test_the_driver_of_cuda_is_not_called_by_the_torch_of_another_vendor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = SimpleNamespace(cuMemcpyBatchAsync=SimpleNamespace())
    monkeypatch.setattr(memory_copies.ctypes, "CDLL", lambda name: driver)
    for version, there in (("12.8", True), (None, False)):
        memory_copies._batch_call.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        assert can_copy(torch.device("cuda", 0), on_device=False) is there
    memory_copies._batch_call.cache_clear()
