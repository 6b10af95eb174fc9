"""Restoring onto a real GPU: bit for bit, from disk and from memory, in order with its streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.conftest import SHARED
from tierfall.errors import RestoreError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
MakeConfig = Callable[..., dict[str, Any]]
ROUNDS = 5
MIB = 1 << 20


def state_on(device: str, seed: int) -> dict[str, Any]:
    """Tensors of many chunks, of a part of one, and thousands of a few bytes; odd lengths; some in host memory."""
    generator = torch.Generator().manual_seed(seed)

    def make(bytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (bytes,), dtype=torch.uint8, generator=generator)

    state: dict[str, Any] = {
        "large": {str(n): make(5 * MIB + n).to(device) for n in range(6)},
        "halves": make(3 * MIB).view(torch.bfloat16).to(device),
        "small": {str(n): make(1 + 13 * n % 3000).to(device) for n in range(3000)},
        "here": {str(n): make(MIB // 2 + n) for n in range(3)},
        "strided": make(MIB).view(1024, 1024).to(device).t(),
    }
    return {**state, "step": seed, "rng": None}


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": tensor for key, tensor in value.items()}
        elif isinstance(value, torch.Tensor):
            found[name] = value
    return found


def assert_same(state: dict[str, Any], saved: dict[str, Any]) -> None:
    wanted = flat(saved)
    wrong = [
        name
        for name, tensor in flat(state).items()
        if not torch.equal(tensor.cpu().view(torch.uint8), wanted[name].cpu().view(torch.uint8))
    ]
    assert wrong == []


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    return make_config(chunk="1MiB", host={"capacity": "256MiB"})


@pytest.mark.parametrize("compress", [None, "zstd", "planes"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bits_are_the_saved_ones(tier: str, compress: str | None, make_config: MakeConfig) -> None:
    disk = {} if compress is None else {"compress": {"codec": compress}}
    saved = state_on("cuda", 1)
    with tierfall.open(make_config(chunk="1MiB", host={"capacity": "256MiB"}, disk=disk)) as ckpt:
        ckpt.save(1, saved, block=True)
        state = state_on("cuda", 2)
        for _ in range(ROUNDS):
            for tensor in flat(state).values():
                tensor.zero_()
            assert ckpt.restore(state, tier=tier) is not None
            assert_same(state, saved)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("of_its_own", [False, True], ids=["default stream", "side stream"])
def test_a_restore_comes_after_what_was_queued_and_before_what_follows(
    tier: str, of_its_own: bool, config: dict[str, Any]
) -> None:
    saved, state = state_on("cuda", 1), state_on("cuda", 2)
    ballast = torch.randn(4096, 4096, device="cuda")
    stream = torch.cuda.Stream() if of_its_own else torch.cuda.current_stream()
    torch.cuda.synchronize()
    with tierfall.open(config) as ckpt, torch.cuda.stream(stream):
        ckpt.save(1, saved, block=True)
        for _ in range(ROUNDS):
            for _ in range(8):
                ballast = torch.tanh(ballast @ ballast)
            for tensor in flat(state).values():
                tensor.fill_(0)  # queued behind all that
            ckpt.restore(state, tier=tier)
            after = {name: tensor.clone() for name, tensor in flat(state).items()}
            for tensor in flat(state).values():
                tensor.fill_(0)  # must not overtake a copy that is under way
            assert_same(after, flat(saved))
            assert not any(bool(tensor.any()) for tensor in flat(state).values())


def test_load_brings_a_checkpoint_to_the_gpu(config: dict[str, Any], tmp_path: Path) -> None:
    saved = state_on("cuda", 1)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, saved, block=True)
    loaded = tierfall.load(tmp_path / "disk", map_location="cuda")
    assert all(tensor.is_cuda for tensor in flat(loaded).values())
    assert_same(loaded, saved)


def test_a_damaged_chunk_fails_the_restore_and_the_next_one_is_whole(
    config: dict[str, Any], tmp_path: Path
) -> None:
    saved, state = state_on("cuda", 1), state_on("cuda", 2)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, saved, block=True)
        (image,) = (tmp_path / "disk").rglob("*.safetensors")
        with image.open("r+b") as file:
            file.seek(17 * MIB)
            (byte,) = file.read(1)
            file.seek(17 * MIB)
            file.write(bytes([byte ^ 1]))
        with pytest.raises(RestoreError, match="HALF FILLED"):
            ckpt.restore(state, step=1, tier="disk")
        ckpt.restore(state, tier="host")
        assert_same(state, saved)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no memory that outlives a process")
def test_what_an_earlier_start_left_in_memory_comes_to_the_gpu(config: dict[str, Any]) -> None:
    config["tiers"][0]["on_close"] = "keep"
    saved, state = state_on("cuda", 1), state_on("cuda", 2)
    with tierfall.open(config) as ckpt:
        ckpt.save(1, saved, block=True)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert report.sources
        assert_same(state, saved)
