"""No rule deletes a copy while the copies that it relies on were not verified, or written, by this run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import blank, state_of, step_in, steps_on, wait_until


def chain(root: Path, **disk: Any) -> dict[str, Any]:
    return {
        "run": "run",
        "max_wait": "20s",
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / "memory")},
            {"name": "disk", "kind": "file", "path": str(root / "disk"), **disk},
        ],
    }


def save(config: dict[str, Any], *steps: int) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        for step in steps:
            ckpt.save(step, state_of(step), block=True)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "disk" / "run").glob("step-*"))


def damage(root: Path, step: int) -> None:
    (image,) = (root / "disk" / "run" / f"step-{step:08d}-a0001").glob("*.safetensors")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 0x10
    image.write_bytes(data)


def is_idle(ckpt: tierfall.Checkpointer) -> bool:
    """Say whether all is done that the coordinator has to do now."""
    return ckpt._session.wait_idle(20)


LATER_RULES: list[dict[str, Any]] = [{"last": 1}, {"for": "1s"}]


@pytest.mark.parametrize("retain", LATER_RULES, ids=str)
def test_nothing_goes_by_rule_before_a_restore_and_an_older_step_is_there_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retain: dict[str, Any]
) -> None:
    """The job was down for longer than ``for``, or ``last`` was lowered; and the newest is damaged, unseen."""
    save(chain(tmp_path), 1, 2, 3)
    damage(tmp_path, 3)
    later_s = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later_s)
    with tierfall.open(chain(tmp_path, retain=retain)) as ckpt:
        assert is_idle(ckpt)
        assert len(folders(tmp_path)) == 3
        state = blank()
        report = ckpt.restore(state)
        assert report is not None
        assert (report.step, step_in(state)) == (2, 2)
        assert is_idle(ckpt)
        assert {"step-00000001-a0001", "step-00000002-a0001"} & set(folders(tmp_path))
        assert "step-00000002-a0001" in folders(tmp_path)


# A tier that the restore did not read ----------------------------------------------------------------


def two_tiers(root: Path, **archive: Any) -> dict[str, Any]:
    config = chain(root)
    config["tiers"].append(
        {
            "name": "archive",
            "kind": "file",
            "path": str(root / "archive"),
            "shared": True,
            **archive,
        }
    )
    return config


def archived(root: Path) -> list[str]:
    return sorted(path.name[:13] for path in (root / "archive" / "run").glob("step-*"))


def saved_on_both(root: Path, *steps: int) -> None:
    with tierfall.open(two_tiers(root)) as ckpt:
        ckpt.restore(blank())
        for step in steps:
            ckpt.save(step, state_of(step), block=True).wait("archive")


def damage_archived(root: Path, step: int) -> None:
    (image,) = (root / "archive" / "run" / f"step-{step:08d}-a0001").glob("*.safetensors")
    data = bytearray(image.read_bytes())
    data[-100] ^= 1
    image.write_bytes(data)


def test_the_newest_on_another_tier_is_read_before_older_ones_go_for_its_sake(
    tmp_path: Path,
) -> None:
    saved_on_both(tmp_path, 1, 2, 3)
    with tierfall.open(two_tiers(tmp_path, retain={"last": 1})) as ckpt:
        ckpt.restore(blank())
        wait_until(lambda: archived(tmp_path) == ["step-00000003"], "it was read, and they went")
    assert steps_on(tmp_path / "archive") == [3]


def test_what_is_damaged_and_lies_nowhere_else_keeps_the_older_ones(tmp_path: Path) -> None:
    saved_on_both(tmp_path, 1, 2, 3)
    damage_archived(tmp_path, 3)
    shutil.rmtree(tmp_path / "disk/run/step-00000003-a0001")
    (tmp_path / "disk/run/latest").unlink()  # else the folder may be away, and no rule deletes
    with tierfall.open(two_tiers(tmp_path, retain={"last": 1})) as ckpt:
        ckpt.restore(blank(), step=2)
        wait_until(lambda: "step-00000001" not in archived(tmp_path), "2 was read, and 1 went")
        assert is_idle(ckpt)
        assert "step-00000002" in archived(tmp_path)


def test_a_damaged_copy_makes_no_room(tmp_path: Path) -> None:
    saved_on_both(tmp_path, 1, 2, 3)
    for step in (2, 3):
        damage_archived(tmp_path, step)
    taken = sum(f.stat().st_size for f in (tmp_path / "archive").rglob("step-*/*"))
    with tierfall.open(two_tiers(tmp_path, capacity=taken + 10_000)) as ckpt:
        ckpt.restore(blank())
        ckpt.save(4, state_of(4)).wait("disk", timeout=20)
        assert is_idle(ckpt)
        assert "step-00000001" in archived(tmp_path)


# Removed while the trainer lives ----------------------------------------------------------------------


@pytest.mark.parametrize("part", ["step-*", "step-*/*.safetensors"])
def test_close_keeps_memory_when_what_it_had_brought_to_tiers_is_gone(
    tmp_path: Path, part: str
) -> None:
    with tierfall.open(chain(tmp_path)) as ckpt:
        ckpt.restore(blank())
        for step in (1, 2):
            ckpt.save(step, state_of(step), block=True)
        assert is_idle(ckpt)
        for path in (tmp_path / "disk" / "run").glob(part):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    state = blank()
    with tierfall.open(chain(tmp_path)) as ckpt:
        report = ckpt.restore(state)
    assert report is not None
    assert (report.step, step_in(state)) == (2, 2)
