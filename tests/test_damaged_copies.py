"""Copies that were purged, truncated or silently damaged under their commit record: they are told as damage, and
protect nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, flip, save_steps, state_of, step_in, steps_on
from tierfall.core.types.errors import RestoreError

MakeConfig = Callable[..., dict[str, Any]]


def image(root: Path, step: int, run: str = "run") -> Path:
    (found,) = (root / run).glob(f"step-{step:08d}-*/*.safetensors*")
    return found


def told(ckpt: Any, step: int) -> tuple[dict[str, str], dict[str, str]]:
    """Return where a trainer says that a step is, and what it says is damaged."""
    (info,) = [info for info in ckpt.checkpoints() if info.step == step]
    copies = info.copies.items()
    return (
        {tier: copy.state for tier, copy in copies if not copy.damage},
        {tier: copy.damage for tier, copy in copies if copy.damage},
    )


@pytest.mark.parametrize(("how", "compress"), [("purged", None), ("truncated", "zstd")])
def test_a_purged_image_never_costs_the_good_copy(
    how: str, compress: str | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    far = {} if compress is None else {"compress": {"codec": compress}}
    config = make_config(near={"capacity": "600KiB"}, far=far)
    save_steps(config, 1, 2, 3)
    victim = image(tmp_path / "far", 1)
    if how == "purged":
        victim.unlink()
    else:
        victim.write_bytes(victim.read_bytes()[:100])
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.drain()
        tiers, damage = told(ckpt, 1)
        assert tiers == {"near": "committed"}
        assert list(damage) == ["far"]
        for step in (4, 5, 6):
            ckpt.save(step, state_of(step), block=True)
        ckpt.drain()
        for step in (2, 3, 4, 5, 6):
            assert told(ckpt, step)[0]["far"] == "committed"
    near = steps_on(tmp_path / "near")
    assert 1 in near, "what far has whole goes before"
    assert len(near) < 6


def test_retention_keeps_the_only_good_copy_of_what_is_damaged_elsewhere(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Else nothing is left by which 'verify --repair' could rewrite the damaged copy."""
    config = make_config(near={"retain": {"last": 2}}, far={})
    save_steps(config, 1, 2)
    victim = image(tmp_path / "far", 2)
    victim.write_bytes(victim.read_bytes()[:100])
    save_steps(config, 3, 4, 5)
    assert steps_on(tmp_path / "near") == [2, 4, 5]


def test_an_error_about_damage_names_what_can_be_restored_instead(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(near={}, far={})
    save_steps(config, 1, 2, 3)
    for tier in ("near", "far"):
        flip(image(tmp_path / tier, 3), 66_000)
    with tierfall.open(config) as ckpt:
        with pytest.raises(
            RestoreError, match=r"near, far: .* 2@1, 1@1. Name one by step="
        ) as named:
            ckpt.restore(blank(), step=3)
        assert "tierfall verify" in str(named.value)
        assert "is skipped" not in caplog.text
        with pytest.raises(RestoreError, match="Only tier near was read"):
            ckpt.restore(blank(), step=3, tier="near")
        assert ckpt.restore(blank(), step=2)
    for step in (1, 2):
        for tier in ("near", "far"):
            flip(image(tmp_path / tier, step), 66_000)
    with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="fresh=True") as every:
        ckpt.restore(blank())
    assert [line[:11] for line in str(every.value).splitlines()[1:-1]] == [
        f"  step {step}@1:" for step in (3, 2, 1)
    ]


# What readers find -------------------------------------------------------------------------------


RECORDS = {"manifest": b'"structure"', "commit": b'"tags"'}


@pytest.mark.parametrize("record", RECORDS)
def test_damaged_records_of_an_image_in_memory_are_no_first_start(
    record: str, memory: Path
) -> None:
    """They hold up no start, and are never taken for nothing: an older image is restored, and reported, or none."""
    host = {"name": "host", "kind": "host", "folder": str(memory), "on_close": "keep"}
    config = {"run": "run", "tiers": [host]}
    with tierfall.open(config) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state_of(step)).captured()
    damage_records(memory, RECORDS[record], 2)
    for _ in range(2):
        with tierfall.open(config) as ckpt:
            report = ckpt.restore(blank())
        assert report is not None
        assert report.step == 1
        assert record in str(report.fallbacks), report
    damage_records(memory, RECORDS[record], 1)
    for _ in range(2):
        with tierfall.open(config) as ckpt, pytest.raises(RestoreError, match="damaged"):
            ckpt.restore(blank())
    with tierfall.open(config, fresh=True) as ckpt:
        for step in (3, 4, 5):
            ckpt.save(step, state_of(step)).captured()
    state = blank()
    with tierfall.open(config) as ckpt:
        ckpt.restore(state)
    assert step_in(state) == 5


def damage_records(memory: Path, word: bytes, step: int) -> None:
    """Flip a bit of what follows a word in the record of a step's image."""
    of_step = re.compile(rb'"run":"run","step":%d,.{,3000}?%b' % (step, word), re.DOTALL)
    (path, found), *_ = [
        (path, found)
        for path in memory.rglob("*.image")
        if (found := of_step.search(path.read_bytes()))
    ]
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(found.end() + 2)
        file.write(bytes([data[found.end() + 2] ^ 1]))
