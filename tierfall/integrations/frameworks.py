"""What the adapters of training frameworks share: supported versions, calls that all ranks make, the random state, and
the retention that a framework's configuration asks for."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from typing import Any

import yaml

from tierfall import Checkpointer, Config, RestoreReport, SaveHandle
from tierfall.config import (
    BestSection,
    RetainSection,
    StoredTierConfig,
    load_config,
)
from tierfall.core.format.catalog import merge
from tierfall.core.types.errors import ConfigError, RanksError, StepError, TierfallError
from tierfall.core.types.values import CheckpointId, CopyState, Direction
from tierfall.run.checkpointer import open_run_of
from tierfall.setup import pointer

logger = logging.getLogger("tierfall")
_SUPPORTED = {
    "deepspeed": ((0, 19), (1,)),
    "lightning": ((2, 6), (3,)),
    "megatron-core": ((0, 16), (0, 17)),
    "transformers": ((5, 18), (6,)),
}
"""The oldest version, and the first that is not supported. pyproject.toml has the same."""
_WHOLE = frozenset({CopyState.SEALED, CopyState.COMMITTED})


def check_version(framework: str) -> None:
    """Raise ConfigError where the installed version of a framework is not supported."""
    (oldest, end), module = _SUPPORTED[framework], framework.replace("-", ".")
    try:
        installed = metadata.version(framework)
    except metadata.PackageNotFoundError:  # it runs from its source
        installed = import_module(module).__version__
    found = re.match(r"(\d+)\.(\d+)", installed)
    if found is None or not oldest <= (int(found[1]), int(found[2])) < end:
        wanted = f"{framework}>={oldest[0]}.{oldest[1]},<{'.'.join(map(str, end))}"
        raise ConfigError(
            f"{framework} {installed} is installed: not supported; pip install '{wanted}'"
        )


def check_interface(module: str, name: str, needed: Sequence[str], supported: str) -> None:
    """Raise ConfigError where a framework has no such class, or the class lacks a method that an adapter needs."""
    framework = module.partition(".")[0]
    try:
        found = getattr(import_module(module), name, None)
        missing = ", ".join(method for method in needed if not hasattr(found, method))
        problem = missing and f"its {name} lacks {missing}"
        if found is None:
            problem = f"{module} has no {name}"
    except ModuleNotFoundError as error:
        if error.name == framework or not f"{module}.".startswith(f"{error.name}."):
            raise
        problem = f"there is no module {error.name}"
    if problem:
        try:
            installed = metadata.version(framework)
        except metadata.PackageNotFoundError:  # it runs from its source
            installed = "of an unknown version"
        raise ConfigError(
            f"{framework} {installed} is installed, supported are {supported}: {problem}"
        )


def meet_all_ranks(ckpt: Checkpointer, call: str, *, failed: bool = False) -> None:
    """Wait until every rank has made this call, before collectives of the framework in which a rank alone would hang.

    It waits ten times ``max_wait``, as a restore does, since a rank may evaluate meanwhile; once ``max_wait`` where the
    training has ``failed`` on this rank. Raises RanksError on each rank that came.
    """
    run = open_run_of(ckpt)
    advice = "Each rank has a part of the state: make the call on all ranks"
    if failed:
        advice = "The training failed on this rank alone, by the error above; start it again"
    try:
        timeout_s = run.config.max_wait_s if failed else run.patience_s
        run.session.ranks.meet(call, timeout_s=timeout_s)
    except RanksError as error:
        raise RanksError(f"{error}. Nothing was saved. {advice}") from error


def check_on_all_ranks(
    ckpt: Checkpointer,
    call: str,
    check: Callable[[], None],
    kind: type[TierfallError] = ConfigError,
) -> None:
    """Make a check of what this rank sees, on all ranks. Raises an error of that kind on every rank where it fails on
    one."""
    run, problem = open_run_of(ckpt), ""
    try:
        check()
    except Exception as error:  # noqa: BLE001 - the other ranks wait; raised on all
        problem = str(error) or repr(error)

    def decide(found: dict[int, str]) -> None:
        for rank, text in found.items():
            if text:
                raise kind(run.session.ranks.topology.name_rank(rank, text))

    run.session.ranks.agree(call, problem, decide, object, timeout_s=run.patience_s)


def on_each_node(ckpt: Checkpointer, call: str, act: Callable[[int], None]) -> None:
    """Call a function on one rank of each node, with its number. Raises ConfigError on every rank where it fails."""
    topology = open_run_of(ckpt).session.ranks.topology
    is_first = topology.local_ranks[0] == topology.rank
    check_on_all_ranks(ckpt, call, lambda: act(topology.rank) if is_first else None)


def newest_first(ckpt: Checkpointer, report: RestoreReport) -> Iterator[dict[str, int]]:
    """Yield step and attempt of a report, and then those of older checkpoints. All ranks get the same, and continue
    together."""
    yield {"step": report.step, "attempt": report.attempt}
    at = CheckpointId(report.step, report.attempt)
    run = open_run_of(ckpt)
    request = run.restore_request(None, None, doing="load")
    known = run.candidates(request, run.session.new_tally(), reads_all=True)
    for each in known:
        if each.id < at:  # not "after it in the list": it may be gone by now
            yield {"step": each.id.step, "attempt": each.id.attempt}


def begin(ckpt: Checkpointer, call: str) -> None:
    """Begin a run that has no checkpoint. Raises StepError where it has one: ``call`` resumes from it."""
    try:
        ckpt.begin()
    except StepError as error:
        raise StepError(f"{error}. To continue, call {call}") from None


def restore_random(ckpt: Checkpointer, report: RestoreReport) -> None:
    """Set the random state of a checkpoint that was restored or loaded; last, as the framework draws from it before.

    That of another number of ranks fits none, so it is not set. All ranks make this call.
    """
    run, at = open_run_of(ckpt), CheckpointId(report.step, report.attempt)
    ranks = run.session.ranks
    request = run.restore_request(report.step, report.attempt)
    partial = run.session.tiers.is_partial
    known = merge(run.session.list_to_restore(request)) if partial else run.session.known()
    commits = [each.commit for each in known if each.id == at]
    # 0: on no tier that this rank sees, or saved since this start.
    here = next((commit.world_size for commit in commits if commit is not None), 0)
    saved_by = ranks.agree(
        "restore the random state",
        here,
        lambda found: max(found.values()),
        int,
        timeout_s=run.patience_s,
    )
    if saved_by in (0, ranks.shard.world_size):
        ckpt.restore({}, step=report.step, attempt=report.attempt, only=["rng"])


def run_of(ckpt: Checkpointer) -> str:
    """Return the name of the run."""
    return open_run_of(ckpt).run


def pointer_file(ckpt: Checkpointer, handle: SaveHandle) -> tuple[str, bytes]:
    """Return the name and the content of the file that is a pointer to what ``handle`` saves."""
    at = CheckpointId(handle.step, handle.attempt)
    found = pointer.pointer_to(open_run_of(ckpt).config, at)
    return pointer.POINTER_NAME, pointer.encode(found)


def config_of(config: Any, run: str | None) -> Config:
    """Return what ``tierfall.open`` makes of these arguments."""
    return load_config(config, run=run)


def read_config(path: str, run: str | None, *, keep_last: int) -> Config:
    """Return the configuration in a file. Each tier there that has no ``retain`` keeps the newest ``keep_last``
    checkpoints, or all of them for 0. Raises ConfigError."""
    config = load_config(path, run=run)
    keep = {"retain": RetainSection(last=keep_last or None)}
    tiers = [
        tier.model_copy(update=keep)
        if isinstance(tier, StoredTierConfig)
        and not tier.read_only
        and "retain" not in tier.model_fields_set
        else tier
        for tier in config.tiers
    ]
    return config.model_copy(update={"tiers": tuple(tiers)})


# What the tiers keep -------------------------------------------------------------------------------


class Best(BestSection):
    """The ``count`` best checkpoints by ``metric``, as ``retain.best`` has it."""

    @classmethod
    def by(cls, metric: str, mode: str, count: int = 1) -> Best:
        """``mode`` is ``min`` or ``max``."""
        return cls(metric=metric, mode=Direction(mode), count=count)

    def is_newest(self) -> bool:
        """Return whether these are the newest: ``last`` of ``retain`` keeps them."""
        return self.metric == "step" and self.mode is Direction.MAX


def keeps_all(ckpt: Checkpointer) -> bool:
    """Return whether a tier gets every checkpoint, and has no ``retain``."""
    return any(tier.flush.every == 1 and not tier.retain.rules() for tier in _stored(ckpt))


def missing_for(ckpt: Checkpointer, best: Best) -> str:
    """Return what the configuration lacks so that a tier keeps the best checkpoints; empty if it lacks nothing."""
    stored = _stored(ckpt)
    has = any(tier.flush.every == 1 and _covers(tier.retain, best) for tier in stored)
    if has or keeps_all(ckpt):
        return ""
    words = best.model_dump(mode="json", exclude={"count"} if best.count == 1 else None)
    line = yaml.safe_dump({"best": words}, default_flow_style=True, sort_keys=False, width=math.inf)
    line = f"last: {best.count}" if best.is_newest() else line.strip()[1:-1]
    if not stored:
        line = line if best.is_newest() else f"last: 1, {line}"
        return f"a tier of kind file with `retain: {{{line}}}`"
    tier = min(stored, key=lambda each: (each.flush.every, each.retain.best is not None))
    every = "" if tier.flush.every == 1 else ", and `flush: {every: 1}`"
    return f"`{line}` in `retain`{every} of tier {tier.name}"


def _covers(retain: RetainSection, best: Best) -> bool:
    kept = retain.best
    if best.is_newest() and (retain.last or 0) >= best.count:
        return True
    if kept is None or (kept.metric, kept.mode) != (best.metric, best.mode):
        return False
    return kept.count >= best.count


def keep_last(ckpt: Checkpointer, last: int | None, best: Best | None) -> None:
    """Have each tier without ``retain`` keep the newest ``last`` checkpoints, or all of them for None or 0, and the
    best. Where ``retain`` says something else, rank 0 logs a warning. All ranks make this call."""
    session = open_run_of(ckpt).session
    own = [tier for tier in _stored(ckpt) if "retain" in tier.model_fields_set]
    others = {tier.name for tier in _stored(ckpt)} - {tier.name for tier in own}
    wanted = RetainSection(last=last, best=best) if last else RetainSection()
    session.call_in_turn(
        lambda: session.coordinator.ledger.set_retain(dict.fromkeys(others, wanted.rules()))
    )
    differ = [tier.name for tier in own if last and tier.retain.last != last]
    if differ and session.ranks.topology.is_root:
        logger.warning(
            "save_total_limit=%d has no effect on %s: `retain` of the configuration decides there; for the same, "
            "write `last: %d` in it",
            last,
            ", ".join(differ),
            last,
        )


def note_evaluation(ckpt: Checkpointer, step: float) -> None:
    """Note the step of the last evaluation; infinity before the first one. If no checkpoint has the metric of
    ``retain.best``, a warning follows the first save after that step."""
    session = open_run_of(ckpt).session
    session.call_soon(lambda: setattr(session.coordinator.ledger, "evaluated_at", step))


def best_step(ckpt: Checkpointer, best: Best, named: int | None) -> int | None:
    """Return the step of the best checkpoint that there is, as rank 0 sees it; None if none has the metric. Of equal
    ones that of ``named``, else the newest. All ranks make this call."""
    run, sign = open_run_of(ckpt), 1 if best.mode is Direction.MIN else -1
    run.prepare_restore(continues=False)  # the metrics of the last save are known once it is sealed
    there = [
        (sign * x.metrics[best.metric], x.step != named, -x.step)
        for x in ckpt.checkpoints()
        if not x.abandoned and not _WHOLE.isdisjoint(copy.state for copy in x.copies.values())
        if not math.isnan(x.metrics.get(best.metric, math.nan))
    ]
    found = -min(there)[2] if there else -1
    step = run.session.ranks.agree(
        "load the best model",
        found,
        lambda by_rank: by_rank[0],
        int,
        timeout_s=run.patience_s,
    )
    return None if step < 0 else step


def _stored(ckpt: Checkpointer) -> list[StoredTierConfig]:
    """Return the written tiers but peer memory, which keeps what fits."""
    return [tier for tier in open_run_of(ckpt).config.storage if not tier.read_only]
