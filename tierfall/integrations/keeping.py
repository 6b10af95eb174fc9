"""Which checkpoints the tiers of a run keep, where a framework has settings of its own for that."""

from __future__ import annotations

import logging
import math

import yaml

from tierfall import Checkpointer
from tierfall.config import BestSection, PeerTierConfig, RetainSection, StoredTierConfig
from tierfall.core.types.values import CopyState, Direction
from tierfall.run.checkpointer import open_run_of

logger = logging.getLogger("tierfall")
_WHOLE = frozenset({CopyState.SEALED, CopyState.COMMITTED})


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
    own = [tier for tier in _written(ckpt) if "retain" in tier.model_fields_set]
    others = {tier.name for tier in _written(ckpt)} - {tier.name for tier in own}
    wanted = RetainSection(last=last, best=best) if last else RetainSection()
    session.call(
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
        if not x.abandoned and not _WHOLE.isdisjoint(x.tiers.values())
        if not math.isnan(x.metrics.get(best.metric, math.nan))
    ]
    found = -min(there)[2] if there else -1
    step = run.session.ranks.agree(
        "load the best model",
        found,
        lambda by_rank: by_rank[0],
        int,
        timeout_s=run.restorer.patience_s,
    )
    return None if step < 0 else step


def _written(ckpt: Checkpointer) -> list[StoredTierConfig]:
    tiers = open_run_of(ckpt).config.tiers
    return [tier for tier in tiers if isinstance(tier, StoredTierConfig) and not tier.read_only]


def _stored(ckpt: Checkpointer) -> list[StoredTierConfig]:
    """Return the written tiers but peer memory, which keeps what fits."""
    return [tier for tier in _written(ckpt) if not isinstance(tier, PeerTierConfig)]
