"""One flipped bit anywhere in a checkpoint: ``verify`` finds it and ``load`` refuses it, every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CheckpointId
from tierfall.ops.reader import resolve_path
from tierfall.tiers.stored import StoredTier

SEED = 20261121


@pytest.fixture
def step_folder(make_config: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A checkpoint of 24 KiB in chunks of 4 KiB, with several dtypes."""
    state = {
        "w": torch.randn(2000),
        "h": torch.randn(1501).bfloat16(),
        "odd": torch.arange(333, dtype=torch.uint8),
        "extra": {"epoch": 3},
    }
    with tierfall.open(make_config(chunk="4KiB")) as ckpt:
        ckpt.save(1, state, metrics={"loss": 0.5}, tags=["first"], block=True)
    return tmp_path / "disk" / "run" / "step-00000001-a0001"


def flips(folder: Path, trials: int) -> Iterator[tuple[str, int]]:
    """Flip a random bit of a random file, hand out where, and flip it back."""
    source = random.Random(SEED)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    assert [str(path.relative_to(folder)) for path in files] == [
        "commit.json",
        "rank-00000-of-00001.json",
        "rank-00000-of-00001.safetensors",
    ]
    for _ in range(trials):
        path = source.choice(files)
        good = path.read_bytes()
        bit = source.randrange(len(good) * 8)
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        yield str(path.relative_to(folder)), bit
        path.write_bytes(good)


@pytest.mark.parametrize("trials", [60, pytest.param(3000, marks=pytest.mark.torture)])
def test_every_flipped_bit_is_found_and_refused(step_folder: Path, trials: int) -> None:
    place = resolve_path(step_folder)
    backend = PosixBackend(place.root, read_only=True)
    store = StoredTier(name="disk", run=place.run, backend=backend)
    id = CheckpointId(1, 1)
    missed = []
    with CopyVerifier() as verifier:
        assert verifier.check_stored(store, id).good
        for file, bit in flips(step_folder, trials):
            found = verifier.check_stored(store, id)
            if file not in {damage.file for damage in found.damage}:
                missed.append((file, bit))
            with pytest.raises(RestoreError, match="1@1"):
                tierfall.load(step_folder)
        assert verifier.check_stored(store, id).good
    store.close()
    assert missed == []
    assert tierfall.load(step_folder)["w"].shape == (2000,)
