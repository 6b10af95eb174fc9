"""Checkpoints that several ranks save, each a thread of this process, onto tiers that all see."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.core.ranks.threads import network, on_all
from tierfall.config import Config
from tierfall.core.capture.handle import SaveHandle
from tierfall.core.format.catalog import merge
from tierfall.export.export import ExportFormat, ExportOptions, ExportResult, export
from tierfall.ops.reader import RunReader
from tierfall.run.checkpointer import Checkpointer
from tierfall.telemetry.reports import RestoreReport

SOON_S = 20.0
State = Callable[[int, int], dict[str, Any]]


def config_of(folder: Path, **tiers: dict[str, Any]) -> Config:
    """A run whose stored tiers all ranks see: ``shared`` alone, or those named, with what they are set to."""
    stored = [
        {"name": name, "kind": "file", "path": str(folder / name), "shared": True, **settings}
        for name, settings in (tiers or {"shared": {}}).items()
    ]
    host = {"name": "host", "kind": "host", "folder": str(folder / "memory")}
    return Config.model_validate(
        {"run": "run", "max_wait": "10s", "chunk": "64KiB", "tiers": [host, *stored]}
    )


def save_on_ranks(
    config: Config, world_size: int, steps: Iterable[int], state: State, *, go_on: bool = False
) -> None:
    """Save ``state(rank, step)`` on every rank, each step through to the last tier before the next; ``go_on`` from what
    was saved before."""
    with network(["a"] * world_size) as ranks:
        opened = on_all([lambda r=r: Checkpointer(config, ranks=r) for r in ranks])  # type: ignore[misc]
        for one in opened:
            assert isinstance(one, Checkpointer), one
        if go_on:
            pairs = zip(opened, [state(rank, 0) for rank in range(world_size)], strict=True)
            for report in on_all([lambda c=c, s=s: c.restore(s) for c, s in pairs]):  # type: ignore[misc]
                assert isinstance(report, RestoreReport), report
        for step in steps:
            states = [state(rank, step) for rank in range(world_size)]
            pairs = zip(opened, states, strict=True)
            handles = on_all([lambda c=c, s=s, n=step: c.save(n, s) for c, s in pairs])  # type: ignore[misc]
            for handle in handles:
                assert isinstance(handle, SaveHandle), handle
                for tier in config.stored:
                    handle.wait(tier.name, timeout=SOON_S)
        assert on_all([one.close for one in opened]) == [None] * world_size


def export_from(config: Config, *tiers: str, watch: Any = None, **wish: Any) -> ExportResult:
    """Export the newest step from these tiers."""
    with RunReader(config) as run:
        known = merge(run.list())[-1]
        words = {"format": ExportFormat.SAFETENSORS, **wish}
        more = () if watch is None else (watch,)
        return export(known, tiers, run.opener(), ExportOptions(**words), *more)
