"""Arithmetic on samples: medians, spreads, ratios and whether they meet their targets. Nothing here measures."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
MEMORY_TARGET_BYTES = 100 * MIB
RESAMPLES = 10_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One figure that is no quotient of two series' medians, with what its interval says and its unit."""

    name: str
    value: float
    low: float
    high: float
    interval: str
    unit: str = ""
    target: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


def paired(
    name: str,
    samples: Mapping[str, Sequence[float]],
    *,
    subject: str,
    reference: str,
    target: float | None = None,
) -> Finding:
    """Return the median quotient of two series' pairs, with its 95 % bootstrap interval (Efron, 1979, percentiles)."""
    pairs = list(zip(samples[subject], samples[reference], strict=True))
    quotients = [a / b for a, b in pairs]
    low, high = bootstrap(quotients)
    return Finding(
        name=name,
        value=statistics.median(quotients),
        low=low,
        high=high,
        interval="95 %",
        target=target,
    )


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % interval of the median of some values, over resamples drawn with replacement."""
    draw = random.Random(seed)
    medians = sorted(
        statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES)
    )
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def over_rounds(
    name: str, values: Sequence[float], *, unit: str, target: float | None = None
) -> Finding:
    """Return the median of one figure a round, with the least and the most."""
    one = spread(values)
    return Finding(
        name=name,
        value=one.median,
        low=one.low,
        high=one.high,
        interval="rounds",
        unit=unit,
        target=target,
    )


@dataclass(slots=True, kw_only=True)
class Results:
    """All that one run found. ``samples`` are seconds by series; ``direct`` who ran direct I/O."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    ratios: list[Ratio] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
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
    verdicts = [each.met for each in results.ratios]
    verdicts += [each.met for each in results.findings]
    verdicts.append(results.memory_met)
    return MISSED if False in verdicts and not report_only else MET
