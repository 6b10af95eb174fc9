"""DirectWriter: a TierWriter in a process of DCP's own (``AsyncCheckpointerType.PROCESS``).

That process has neither the arena nor the Checkpointer. Each rank writes its image to the first stored tier. The
coordinator commits the checkpoint there once every rank has written its image.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tierfall.config import Config
from tierfall.core.copies.image_writes import write_view
from tierfall.core.format.records import Attempt, Commit, Lineage, NamedFile
from tierfall.core.runtime.wait import InterruptibleEvent
from tierfall.core.scheduler.group.external_commits import ExternalCommits
from tierfall.core.state.walk import walk_state
from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, FlushError
from tierfall.core.types.values import CheckpointId, Shard
from tierfall.integrations.dcp.planning import count_outcomes, planned_state, results_of
from tierfall.run.open_run import OpenRun
from tierfall.run.saver import checked_metrics, checked_tags
from tierfall.setup.lineage import as_step
from tierfall.setup.tiers import is_shared, open_store


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectWrite:
    """What a process needs to write one rank's shard of one step."""

    config: Config
    run: str
    tier: str
    attempt: Attempt
    lineage: Lineage
    shard: Shard
    node: str
    metrics: Mapping[str, float]
    tags: tuple[str, ...]


def direct_write(
    run: OpenRun, step: int, *, metrics: Mapping[str, Any], tags: Sequence[str]
) -> DirectWrite:
    """Reserve the next place in the run's lineage for ``step``, which another process writes.

    Raises StepError for a step that may not follow, ConfigError where one rank cannot commit on the first stored tier.
    """
    session, lineage = run.session, run.lineage
    run.check_usable()
    step = as_step(step)
    tier = next((t for t in run.config.written if t.name in session.stores), None)
    if tier is None:
        raise ConfigError(
            "dcp.async_save: PROCESS mode writes to a stored tier, and the configuration has none"
        )
    if not is_shared(tier) and len(session.ranks.topology.nodes) > 1:
        raise ConfigError(
            f"dcp.async_save: in PROCESS mode rank 0 commits, and each node has its own tier {tier.name}: put a tier "
            "first that all nodes share, or use AsyncCheckpointerType.THREAD"
        )
    with run.saver.lock:
        lineage.check(step)
        place = lineage.next(step, above=session.coordinator.ledger.least_ordinal)
        lineage.advance(place)
    session.call_soon(
        lambda: _expect(session.coordinator.external_commits, place.checkpoint, tier.name)
    )
    return DirectWrite(
        config=run.config,
        run=session.run,
        tier=tier.name,
        attempt=lineage.attempt,
        lineage=place,
        shard=session.ranks.shard,
        node=session.node,
        metrics={name: float(value) for name, value in checked_metrics(metrics).items()},
        tags=checked_tags(tags),
    )


def _expect(finder: ExternalCommits, id: CheckpointId, tier: str) -> None:
    finder.search(InterruptibleEvent())  # for earlier ones
    finder.expect(id, tier)


@dataclass(frozen=True)
class ImageFiles(WriteResult):
    """A rank's image and manifest, as in the commit record, in ``storage_data``."""


class DirectWriter(StorageWriter):
    """Writes one rank's shard of a step to a tier; on the coordinator it also commits."""

    def __init__(self, request: DirectWrite) -> None:
        self._request = request

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Refuse a path, as TierWriter does."""
        if checkpoint_id is not None:
            raise ConfigError("dcp.save: checkpoint_id beside a TierWriter: leave it out")

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no setup is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans unchanged."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image and manifest, which do not count before ``finish``."""
        request = self._request
        view = walk_state(planned_state(plan, planner), with_random=False)
        with open_store(request.config, request.run, request.tier) as store:
            store.check_fence(request.attempt)
            files = write_view(
                store,
                view,
                lineage=request.lineage,
                shard=request.shard,
                chunk_bytes=request.config.chunk_bytes,
                commit=partial(commit_of, request),
            )
        index = MetadataIndex(keys.shard_name(request.shard))
        written = ImageFiles(
            index=index, size_in_bytes=sum(f.bytes for f in files), storage_data=files
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result([written, *results_of(plan)])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the step; FlushError where a rank's image or an item of the plan is missing."""
        request = self._request
        step, world_size = request.lineage.checkpoint.step, request.shard.world_size
        found = [r for of_rank in results for r in of_rank if isinstance(r, ImageFiles)]
        files = tuple(file for result in found for file in result.storage_data)
        if len({result.index for result in found}) != world_size:
            raise FlushError(
                f"dcp.save of step {step}: {len(found)} of {world_size} ranks have written their images; the step is "
                "not committed. In PROCESS mode all ranks of the Checkpointer save together, without no_dist"
            )
        count_outcomes(metadata, results, step)
        with open_store(request.config, request.run, request.tier) as store:
            store.commit(commit_of(request, files), attempt=request.attempt)
            store.write_latest(request.lineage.checkpoint)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no path is accepted."""
        return False


def commit_of(request: DirectWrite, files: tuple[NamedFile, ...]) -> Commit:
    """Return the commit record of a step with these files."""
    return Commit(
        lineage=request.lineage,
        world_size=request.shard.world_size,
        files=files,
        nodes=(request.node,),
        wall_time_s=time.time(),
        metrics=request.metrics,
        tags=request.tags,
    )
