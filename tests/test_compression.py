"""Compression from the configuration to a restore: the state comes back, plain tools read the files, and statistics
count it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tierfall.config import load_config
from tierfall.core.types.errors import RestoreError
from tierfall.ops.commands import forget

Make = Callable[..., Any]
CODECS = ["zstd", "planes"]


def weights(seed: int = 0) -> dict[str, Any]:
    """Weights that compress as real ones do: their exponents take few values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    return {"model": model.to(torch.bfloat16), "half": torch.randn(70_000) * 0.02, "step": seed}


def packed(codec: str, **more: Any) -> dict[str, Any]:
    return {"compress": {"codec": codec, **more}}


def image_on(folder: Path, step: int = 1) -> Path:
    (found,) = folder.glob(f"run/step-{step:08d}-*/rank-*.safetensors*")
    return found


def same(loaded: dict[str, Any], state: dict[str, Any]) -> bool:
    model = state["model"].state_dict()
    return (
        all(torch.equal(loaded["model"][name], model[name]) for name in model)
        and torch.equal(loaded["half"], state["half"])
        and loaded["step"] == state["step"]
    )


@pytest.mark.parametrize("codec", CODECS)
def test_a_path_to_a_packed_shard_a_step_or_a_run_loads(
    make_config: Make, tmp_path: Path, codec: str
) -> None:
    state = weights()
    with tierfall.open(make_config(small=packed(codec))) as ckpt:
        ckpt.save(1, state, block=True)
    shard = image_on(tmp_path / "small")
    for path in (shard, shard.parent, shard.parent.parent, tmp_path / "small"):
        assert same(tierfall.load(path), state)


@pytest.mark.parametrize(
    ("first", "second"), [("zstd", "none"), ("planes", "zstd"), ("none", "planes")]
)
def test_a_tier_that_was_lost_is_filled_from_one_that_packs_otherwise(
    make_config: Make, tmp_path: Path, first: str, second: str
) -> None:
    config = make_config(one=packed(first), two=packed(second))
    state = weights()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    shutil.rmtree(tmp_path / "two")
    forget(load_config(config), "two")
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(weights(5)) is not None
        report = ckpt.drain()
        assert report.left == ()
        (info,) = ckpt.checkpoints()
        assert info.copies["two"].state == "committed"
    shutil.rmtree(tmp_path / "one")
    assert same(tierfall.load(tmp_path / "two"), state)


def test_a_record_that_vouches_for_frames_elsewhere_is_refused(
    make_config: Make, tmp_path: Path
) -> None:
    with tierfall.open(make_config(small=packed("zstd"))) as ckpt:
        ckpt.save(1, weights(1), block=True)
        ckpt.save(2, weights(2), block=True)
    one, two = (image_on(tmp_path / "small", step).parent for step in (1, 2))
    (record,) = one.glob("*.stored.json")
    shutil.copy(record, two / record.name)
    with pytest.raises(RestoreError, match="is not the record that the commit record names"):
        tierfall.load(tmp_path / "small", step=2)
