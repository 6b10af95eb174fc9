"""How much is written to each tier at once, and the buffers for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tierfall.config import Config
from tierfall.core.compression.frames import frame_bytes_max
from tierfall.core.runtime.buffers import BufferPool
from tierfall.core.scheduler.flush.lane import LaneLimits
from tierfall.tiers.stored import StoredTier

BUDGET_BYTES = 64 << 20
WORKERS_MAX = 4


def _workers() -> int:
    """Return how many threads write chunks to a disk: more would use cores that training needs."""
    return max(1, min(os.cpu_count() or 1, WORKERS_MAX))


def packers() -> int:
    """Return how many threads pack and send: one more than write, so that one packs while the others send."""
    return 1 + _workers()


def lane_limits(store: StoredTier, config: Config) -> LaneLimits:
    """Return how much may be in flight to a tier at once. A remote tier has more threads, since they mostly wait."""
    traits = store.backend.traits
    threads = _workers()
    is_remote = any(tier.name == store.name and tier.folder is None for tier in config.stored)
    if store.is_packed:
        threads = packers()
    elif is_remote:
        threads = max(WORKERS_MAX, BUDGET_BYTES // config.chunk_bytes)
    parallel = 1 if traits.ordered_writes else max(1, min(traits.max_parallel, threads))
    in_order = store.is_packed or traits.ordered_writes
    return LaneLimits(
        parallel=parallel,
        budget_bytes=BUDGET_BYTES,
        window=parallel + store.is_packed if in_order else 0,
        run_bytes_min=0 if store.is_packed else traits.part_bytes_min,
    )


def lane_pools(config: Config, lanes: Mapping[str, LaneLimits]) -> dict[str, BufferPool]:
    """Return the buffers for copies from one stored tier to each other; memory is allocated at first use.

    All have one length, so that tiers that need the same bytes can exchange them.
    """
    longest = max((limits.run_bytes_min for limits in lanes.values()), default=0)
    size_bytes = frame_bytes_max(max(config.chunk_bytes, longest))
    return {
        tier: BufferPool(
            bytes=size_bytes,
            count=max(1, min(limits.parallel, limits.budget_bytes // size_bytes)),
        )
        for tier, limits in lanes.items()
    }
