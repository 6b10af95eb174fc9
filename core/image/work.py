"""What one restore is planned with: the part that is asked for, and lists of what to do once the bytes are there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tierfall.core.image import naming
from tierfall.core.image.build import Builder
from tierfall.core.image.fit import Fitter
from tierfall.core.image.header import ImageHeader
from tierfall.core.image.modules import Scans
from tierfall.core.image.report import Report

Action = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a checkpoint that is asked for: dotted prefixes of names, or all of it."""

    prefixes: tuple[str, ...] | None

    def has(self, name: str) -> bool:
        """Say whether all of ``name`` is asked for."""
        return self.prefixes is None or any(naming.is_within(name, p) for p in self.prefixes)

    def touches(self, name: str) -> bool:
        """Say whether something at or below ``name`` is asked for."""
        return self.has(name) or any(naming.is_within(p, name) for p in self.prefixes or ())


@dataclass(slots=True)
class Work:
    """The state of planning, shared by the walks over containers, modules and optimizers."""

    header: ImageHeader
    selection: Selection
    report: Report
    scans: Scans
    builder: Builder = field(init=False)
    fitter: Fitter = field(init=False)
    puts: list[Action] = field(default_factory=list)
    loads: list[Action] = field(default_factory=list)
    last: list[Action] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.builder = Builder(self.header)
        self.fitter = Fitter(self.builder, self.report)

    def stages(self) -> tuple[tuple[Action, ...], ...]:
        """Return what is to be done, stage by stage."""
        stages = (self.fitter.copies, self.puts, self.loads, self.last)
        return tuple(tuple(stage) for stage in stages)
