"""Arithmetic on samples: medians, spreads, ratios and whether they meet their targets. Nothing here measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
MEMORY_TARGET_BYTES = 200 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A median, and the least and the most that was seen."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    if not values:
        raise ValueError("no samples: a spread needs at least one")
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """What one thing costs over another: the quotient of the medians, and the spread of the rounds' own quotients.

    ``target`` is the most that it may be; None: reported only.
    """

    name: str
    subject: str
    reference: str
    value: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


def ratio(
    name: str,
    samples: Mapping[str, Sequence[float]],
    *,
    subject: str,
    reference: str,
    target: float | None = None,
) -> Ratio:
    """Divide two series of one run, round by round and median by median."""
    above, below = samples[subject], samples[reference]
    if len(above) != len(below):
        raise ValueError(f"{name}: {len(above)} samples over {len(below)}: not of the same rounds")
    each = spread([a / b for a, b in zip(above, below, strict=True)])
    return Ratio(
        name=name,
        subject=subject,
        reference=reference,
        value=statistics.median(above) / statistics.median(below),
        low=each.low,
        high=each.high,
        target=target,
    )


@dataclass(slots=True, kw_only=True)
class Results:
    """All that one run found. ``samples`` are seconds by series; ``direct`` who ran direct I/O."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    direct: dict[str, bool] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_met(self) -> bool | None:
        if self.memory is None:
            return None
        return int(self.memory["extra_bytes"]) <= MEMORY_TARGET_BYTES

    @property
    def comparable(self) -> bool:
        """False where the file tier went through the page cache while the reference went around it."""
        return self.direct.get("tierfall", False) or not self.direct.get("reference", False)


MET, MISSED, NOT_COMPARABLE = 0, 1, 2


def exit_code(results: Results, *, report_only: bool) -> int:
    """0: all targets are met (or only a report was asked for), 1: one is missed, 2: the two sides did different I/O."""
    if not results.comparable:
        return NOT_COMPARABLE
    verdicts = [*(r.met for r in results.ratios), results.memory_met]
    return MISSED if False in verdicts and not report_only else MET
