"""What a run has measured, by its event log, and what a plan says to change. Times are in seconds."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import format_duration
from tierfall.core.types.values import LossClass
from tierfall.plan.answers import Plan
from tierfall.plan.cluster import Cluster, PlanTier
from tierfall.plan.layout import RankBytes, node_max

GAIN_MIN = 0.001
"""An interval that is better by less of all time is no reason to change one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Medians of rank 0 of a run; None: not known. ``image_bytes`` is the largest image that a log has; ``copy_s`` is
    by tier; ``mtbf`` is by the starts that did not end with ``close`` before another one: the last may be alive if the
    log does not say that it ``ended``."""

    name: str
    image_bytes: int
    ranks: int
    step_s: float | None
    every_s: float | None
    blocked_s: float
    copy_s: Mapping[str, float]
    mtbf: dict[LossClass, float] | None
    ended: bool

    def rate_of(self, tier: PlanTier, sizes: RankBytes, cluster: Cluster) -> PlanTier:
        """Return a tier with the rate that its copies had, if there were any."""
        if not (copy_s := self.copy_s.get(tier.name)):
            return tier
        of_node = node_max(sizes.written, cluster.ranks_per_node) * tier.copies
        written = sum(sizes.written) if tier.shared else of_node
        return replace(tier, write_bytes_per_s=written / copy_s, source="copies of the run")

    def changes(self, plan: Plan) -> Iterator[str]:
        """Yield what to change, by what was measured."""
        now_s = self.every_s or plan.every_s
        now, best, steps = plan.ettr_at(now_s), plan.ettr_at(plan.best_s), plan.best_s / plan.step_s
        change = f"set interval: {{every: {steps:.0f}}} ({format_duration(plan.best_s)}), which gives {best:.2%}"
        if best - now < GAIN_MIN:
            change = f"no other interval gains {GAIN_MIN:.1%}"
        yield f"a save comes every {format_duration(now_s)}, ETTR {now:.2%}: {change}"
        yield from replace(plan, every_given_s=now_s).faults()
        if not self.ended:
            yield "the last start has not closed: it counts as alive, and as no failure"


def read_events(folder: Path) -> Measured:
    """Read the event logs in a folder, ``*.jsonl``: those of the run that wrote last. Raises ConfigError."""
    try:
        lines = [line for path in folder.glob("*.jsonl*") for line in _lines(path)]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror}") from error
    lines.sort(key=itemgetter("wall_time_s"))  # an older part of a log has another name
    lines = [line for line in lines if line["run"] == lines[-1]["run"]]
    # Of rank 0; a start that only ran commands has no attempt.
    own = [line for line in lines if not line["rank"] and line.get("attempt", 0) is not None]
    captured = [line for line in own if line["kind"] == "captured"]
    starts = [line for line in own if line["kind"] in ("opened", "closed")]
    if len(captured) < 2 or not starts:
        raise ConfigError(
            f"{folder}: there is no event log (*.jsonl) of a run that has saved twice; the key 'events: "
            "./events.jsonl' of the YAML file has a run write one"
        )
    copies: dict[str, list[float]] = defaultdict(list)
    for line in own:
        if line["kind"] == "flush_done":
            copies[line["tier"]].append(line["seconds"])
    newest = [line for line in captured if line["attempt"] == captured[-1]["attempt"]]
    spans = [
        (after["wall_time_s"] - before["wall_time_s"], after["step"] - before["step"])
        for before, after in pairwise(newest)
    ]
    killed = sum(a["kind"] == b["kind"] == "opened" for a, b in pairwise(starts))
    alive_s = lines[-1]["wall_time_s"] - lines[0]["wall_time_s"]
    return Measured(
        name=lines[-1]["run"],
        image_bytes=max(line["bytes"] for line in lines if line["kind"] == "captured"),
        ranks=max(line.get("world_size", 1) for line in starts[-2:]),
        step_s=median(seconds / max(1, steps) for seconds, steps in spans) if spans else None,
        every_s=median(seconds for seconds, _ in spans) if spans else None,
        blocked_s=median(line["blocked_s"] for line in newest),
        copy_s={tier: median(times) for tier, times in copies.items()},
        mtbf={LossClass.PROCESS: alive_s / killed} if killed else None,
        ended=starts[-1]["kind"] == "closed",
    )


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log; one that a kill has cut is skipped, as docs/metrics.md says."""
    for text in path.read_text(errors="replace").splitlines():
        with suppress(ValueError):
            line = json.loads(text)
            known = isinstance(line, dict) and {"run", "rank", "kind"} <= line.keys()
            if known and isinstance(line.get("wall_time_s"), float):
                yield line
