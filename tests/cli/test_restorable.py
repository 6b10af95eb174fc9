"""Which checkpoints can be restored: ``ls``, ``latest``, ``rm``, ``pin``, ``prune``, ``restore`` and
``Checkpointer.delete`` have one answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_kit import Cli

import tierfall
from tests.core.ranks.threads import PATIENCE_S, network, on_all
from tests.steps import blank, memory_of, state_of, step_in, wait_until
from tierfall.cli import commands
from tierfall.core.types.errors import StepError
from tierfall.run.checkpointer import Checkpointer

MakeCli = Callable[..., Cli]
Saved = Callable[..., None]


def purge(step: Path) -> None:
    """Remove the image of a step, as a purge of old files does."""
    next(step.glob("*.safetensors")).unlink()


@pytest.fixture
def purged(make_cli: MakeCli, saved: Saved, tmp_path: Path) -> Cli:
    """A run with steps 1, 2 and 3, of which the newest is damaged."""
    cli = make_cli()
    saved(cli, [1, 2, 3])
    purge(tmp_path / "disk" / "run" / "step-00000003-a0001")
    return cli


def test_every_command_passes_over_a_damaged_step_as_a_restore_does(
    purged: Cli, tmp_path: Path
) -> None:
    assert purged.steps()["3@1"] == {"disk": "damaged"}
    latest = purged("latest", code=1)
    assert latest.out == "2@1\n"
    assert "3@1 is newer, and damaged: disk: " in latest.err
    pinned = purged("pin", "latest", code=1)
    assert pinned.out == "pinned 2@1 on disk\n"
    assert "3@1 is newer, and damaged" in pinned.err
    assert "pin 3@1: damaged: " in purged("pin", "3", code=1).err
    purged("unpin", "2", "3")
    assert "2@1 is the newest step that can be restored; the next is 1@1" in (
        purged("rm", "2", code=1).err
    )
    (disk,) = (tier for tier in purged.config["tiers"] if tier["name"] == "disk")
    purged.configure(
        {**purged.config, "tiers": [purged.config["tiers"][0], {**disk, "retain": {"last": 1}}]}
    )
    purged("prune")
    assert "2@1" in purged.steps(), "the newest whole one was kept"
    with tierfall.open(purged.config) as ckpt:
        state = blank()
        ckpt.restore(state)
        assert step_in(state) == 2


def test_a_linked_step_is_passed_over_by_name(purged: Cli, tmp_path: Path) -> None:
    run = tmp_path / "disk" / "run"
    (run / "step-00000003-a0001").rename(tmp_path / "moved")
    (run / "step-00000003-a0001").symlink_to(tmp_path / "moved")
    latest = purged("latest", code=1)
    assert latest.out == "2@1\n"
    assert "3@1 is newer, and could not be read: " in latest.err
    asked = purged("rm", "3", code=1).err
    assert asked.startswith("tierfall: rm: 3@1 could not be read, and may be good: ")
    assert "repeat with --yes" in asked


def test_the_last_step_that_can_be_restored_takes_a_word_of_its_own(
    purged: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    purged("rm", "2", "--yes")
    for words in (["rm", "1"], ["rm", "1", "--yes"], ["rm", "1", "3", "-y"]):
        refused = purged(*words, code=1)
        assert "no step is left that can be restored" in refused.err
        assert "--even-the-last" in refused.err
    assert "--yes" in purged("rm", "1", "--even-the-last", code=1).err
    assert steps_on_disk(tmp_path) == {1, 3}
    with monkeypatch.context() as patch:
        patch.setattr(commands, "at_terminal", lambda: True)
        asked = purged("rm", "1", "--even-the-last", code=1, input="n\n")
    assert "no step is left that can be restored. Delete it?" in asked.out
    assert steps_on_disk(tmp_path) == {1, 3}
    assert purged("rm", "1", "--even-the-last", "--yes").out == "deleted 1@1 on disk\n"
    assert "no step that can be restored" in purged("latest", code=1).err


def steps_on_disk(root: Path) -> set[int]:
    return {int(folder.name[5:13]) for folder in (root / "disk" / "run").glob("step-*")}


def test_the_python_call_has_the_same_answer(purged: Cli, tmp_path: Path) -> None:
    with tierfall.open(purged.config) as ckpt:
        ckpt.restore(blank())
        ckpt.delete(1)
        with pytest.raises(
            StepError, match=r"no step is left that can be restored.*even_the_last=True"
        ):
            ckpt.delete(2)
        ckpt.save(4, state_of(4), block=True)
        ckpt.delete(2)
        ckpt.delete(4, even_the_last=True)
        assert ckpt.checkpoints() == []


def test_memory_counts_with_the_images_of_all_ranks(tmp_path: Path, memory: Path) -> None:
    """Its size is that of all; without that of one rank it is no step to restore."""
    host = {"name": "host", "kind": "host", "folder": str(memory), "on_close": "keep"}
    disk = {"name": "disk", "kind": "file", "path": str(tmp_path / "disk"), "shared": True}
    cli = Cli(tmp_path, {"run": "run", "tiers": [host, {**disk, "flush": {"every": 2}}]})
    config = tierfall.Config.model_validate(cli.config)

    def sizes() -> list[int]:
        return [c["bytes"] for c in cli.json("ls")["checkpoints"]]

    def watched() -> dict[str, Any]:
        return cli.json("watch", "--once")

    with network(["a", "a"]) as ranks:

        def train(rank: int) -> None:
            with Checkpointer(config, run="run", ranks=ranks[rank]) as ckpt:
                for step in (1, 2):
                    elements = 1000 * (1 + rank)
                    ckpt.save(step, {"w": torch.full((elements,), rank)}, block=step == 2)
                found.append([c.bytes for c in ckpt.checkpoints()])
                both.wait(PATIENCE_S)
                if rank == 0:
                    total = images()
                    wait_until(lambda: watched()["tiers"][0]["used_bytes"] == 2 * total, "watch")
                    assert [c["copies"]["host"]["bytes"] for c in watched()["checkpoints"]] == [
                        total,
                        total,
                    ]
                    assert sizes() == [total, total]
                both.wait(PATIENCE_S)

        def images() -> int:
            files = (tmp_path / "disk" / "run").glob("step-00000002-*/*.safetensors")
            return sum(file.stat().st_size for file in files)

        found: list[list[int]] = []
        both = threading.Barrier(2)
        assert on_all([lambda r=r: train(r) for r in range(2)]) == [None, None]  # type: ignore[misc]
    assert found == [[images()] * 2] * 2
    assert sizes() == [images()] * 2
    assert cli("latest").out == "2@1\n"
    with network(["a", "a"]) as ranks:

        def look(rank: int) -> list[int]:
            with Checkpointer(config, run="run", ranks=ranks[rank]) as ckpt:
                return [c.bytes for c in ckpt.checkpoints()]

        assert on_all([lambda r=r: look(r) for r in range(2)]) == [[images()] * 2] * 2  # type: ignore[misc]
    next((tmp_path / "disk" / "run").glob("step-00000002-*/commit.json")).unlink()
    (memory_of(cli.config) / "slot-1.arena").unlink()
    assert "no step that can be restored" in cli("latest", code=1).err
