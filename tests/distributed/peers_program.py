"""What one rank of a job with peer memory does: functions by name."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tierfall
from tests.distributed import program
from tests.distributed.program import NODE, RANK, main, same
from tierfall.backends.peer.backend import PeerWriter


def config(folder: str, **changes: Any) -> dict[str, Any]:
    root = Path(folder)
    return {
        "run": "many",
        "max_wait": "10s",
        "chunk": "64KiB",
        "interval": {"at_end": changes.pop("at_end", False), "every": 1},
        "tiers": [
            {"name": "host", "kind": "host", "folder": str(root / f"memory-{NODE}")},
            {
                "name": "peers",
                "kind": "peer",
                "path": str(root / f"peers-{NODE}"),
                **changes.pop("peers", {}),
            },
            {
                "name": "pfs",
                "kind": "file",
                "path": str(root / "pfs"),
                "shared": True,
                "flush": {"every": 100},
                **changes.pop("pfs", {}),
            },
        ],
        **changes,
    }


def make_state(step: int) -> dict[str, Any]:
    """The state of ``program``, and a tensor that is the same on all ranks."""
    return {**program.make_state(step), "step": torch.full((1,), float(step))}


def train(folder: str, steps: list[int], wait: str = "", stuck: int = 0, **changes: Any) -> None:
    """Go on from where the run is, and save these steps to peer memory; then wait to be killed. The copies of step
    ``stuck`` to peer memory do not end on rank 0; step 2 is on the tier ``wait``, too. ``survives-RANK`` has what peer
    memory survives, before the first save and at the end."""
    dist.init_process_group("gloo")
    publish = PeerWriter.publish

    def stick(writer: PeerWriter) -> None:
        if f"step-{stuck:08d}" in writer._key and RANK == 0:
            time.sleep(600)
        publish(writer)

    PeerWriter.publish = stick  # type: ignore[method-assign]
    with tierfall.open(config(folder, **changes)) as ckpt:
        ckpt.restore(make_state(0))
        first = ckpt.statistics().peer_survival
        for step in steps:
            handle = ckpt.save(step, make_state(step))
            ckpt.wait_captured()
            if step == stuck:
                time.sleep(1.0)  # the other ranks' copies arrive
                break
            handle.wait("peers", 30)
            if wait and step == 2:
                handle.wait(wait, 30)
        found = (first, ckpt.statistics().peer_survival)
        Path(folder, f"survives-{RANK}").write_text(json.dumps([x and asdict(x) for x in found]))
        Path(folder, f"ready-{RANK}").touch()
        time.sleep(600)


def finish(folder: str, steps: list[int], at_end: bool = True) -> int:
    """Train to the end; return the newest step."""
    with tierfall.open(config(folder, at_end=at_end)) as ckpt:
        ckpt.restore(make_state(0))
        for step in steps:
            ckpt.maybe_save(step, make_state(step))
            ckpt.wait_captured()
    return steps[-1]


def resume(folder: str, **changes: Any) -> dict[str, Any] | None:
    """Restore, and return the step, whether it is bit for bit what this rank saved, and the bytes read by tier."""
    return _resume(folder, make_state(0), same, **changes)


def resume_any(folder: str) -> dict[str, Any] | None:
    """Restore, of what another number of ranks saved, a tensor that each rank had a part of."""
    state = {"step": torch.zeros(1)}
    return _resume(folder, state, lambda one, other: one["step"].item() == 3, only=["step"])


def _resume(
    folder: str,
    state: dict[str, Any],
    is_good: Callable[..., bool],
    only: list[str] | None = None,
    **changes: Any,
) -> dict[str, Any] | None:
    dist.init_process_group("gloo")
    with tierfall.open(config(folder, **changes)) as ckpt:
        report = ckpt.restore(state, only=only)
        if report is None:
            return None
        return {
            "step": report.step,
            "good": is_good(state, make_state(report.step)),
            "tiers": {source.tier: source.bytes for source in report.sources},
            "skipped": [f"{each.what}: {each.reason}" for each in report.fallbacks],
        }


if __name__ == "__main__":
    main(globals())
