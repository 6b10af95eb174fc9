"""Which checkpoints can be restored: ``ls``, ``latest``, ``rm``, ``pin``, ``prune``, ``restore`` and
``Checkpointer.delete`` have one answer."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from cli_kit import Cli

import tierfall
from tests.core.ranks.threads import PATIENCE_S, network, on_all
from tests.steps import memory_of, wait_until
from tierfall.run.checkpointer import Checkpointer


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
            with Checkpointer(config, ranks=ranks[rank]) as ckpt:
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
            with Checkpointer(config, ranks=ranks[rank]) as ckpt:
                return [c.bytes for c in ckpt.checkpoints()]

        assert on_all([lambda r=r: look(r) for r in range(2)]) == [[images()] * 2] * 2  # type: ignore[misc]
    next((tmp_path / "disk" / "run").glob("step-00000002-*/commit.json")).unlink()
    for image in memory_of(cli.config).glob("slot-1.*.image"):
        image.unlink()
    assert "no step that can be restored" in cli("latest", code=1).err
