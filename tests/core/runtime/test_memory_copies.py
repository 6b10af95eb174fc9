"""Many copies, and many sums, in one call each: on a CUDA device; and what adds them up without one."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierfall.core.runtime import driver
from tierfall.core.runtime.memory_copies import Addresses, MemoryCopies, can_copy
from tierfall.core.runtime.pinned import lock_pages
from tierfall.core.runtime.streams import CopyStream
from tierfall.core.sampling import sum_kernel
from tierfall.core.sampling.device_sums import sum_words

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

HALF = 4 << 20
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
    pages = mmap.mmap(-1, -(-room // HALF // 2) * 2 * HALF)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if to == "device":
        memory = torch.zeros(room, dtype=torch.uint8, device=device)
    else:  # by two calls, for copies across both
        locks = [lock_pages(memory.data_ptr() + at, HALF, device) for at in (0, HALF)]
        assert all(lock.locked for lock in locks)
    starts = np.cumsum([0, *(size + 64 for size in SIZES)])[:-1].astype(np.uint64)
    stream = CopyStream(device)
    assert stream.copies_memory(memory)
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
    assert torch.equal(memory[:room].cpu(), wanted)
    if to == "host":
        for lock in locks:
            lock.release()


def ranges_of(
    device: torch.device, shift: int = 0
) -> tuple[list[torch.Tensor], Addresses, NDArray[np.int64]]:
    """Ranges of bytes on a device that begin ``shift`` bytes behind a multiple of 8; their addresses and sizes."""
    parts = [
        torch.randint(0, 256, (size + shift,), dtype=torch.uint8, device=device)[shift:]
        for size in SIZES
    ]
    addresses = np.array([*map(torch.Tensor.data_ptr, parts)], dtype=np.uint64)
    return parts, addresses, np.array(SIZES, dtype=np.int64)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("shift", [0, 1, 2, 4])
def test_the_sums_of_one_kernel_are_those_of_the_words_in_the_image(shift: int) -> None:
    device = torch.device("cuda", 0)
    parts, addresses, sizes = ranges_of(device, shift)
    sums = sum_kernel.add_up(addresses, sizes, device)
    assert sums is not None
    wanted = [sum_words(memoryview(part.cpu().numpy())) for part in parts]
    assert [value % (1 << 64) for value in sums.tolist()] == wanted


@pytest.mark.gpu
@on_gpu
def test_the_host_does_not_wait_for_sums() -> None:
    device = torch.device("cuda", 0)
    _, addresses, sizes = ranges_of(device)
    assert sum_kernel.add_up(addresses, sizes, device) is not None  # compiles the kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)  # cycles: half a second
    assert sum_kernel.add_up(addresses, sizes, device) is not None
    assert not torch.cuda.current_stream().query(), "the device still sleeps"


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 4099])
def test_the_sum_of_bytes_is_that_of_their_words_wherever_they_begin(size: int) -> None:
    data = bytes(range(1, 256)) * 33
    for start in (0, 1, 4):
        part = data[start : start + size]
        words = [int.from_bytes(part[at : at + 8], "little") for at in range(0, size, 8)]
        assert sum_words(memoryview(data)[start : start + size]) == sum(words) % (1 << 64)


def test_the_driver_of_cuda_is_not_called_by_the_torch_of_another_vendor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = SimpleNamespace(cuMemcpyDtoHAsync_v2=SimpleNamespace())
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name: library)
    for version, there in (("12.8", True), (None, False)):
        driver.driver_call.cache_clear()
        monkeypatch.setattr(torch.version, "cuda", version)
        assert can_copy(torch.device("cuda", 0), on_device=False) is there
    driver.driver_call.cache_clear()
