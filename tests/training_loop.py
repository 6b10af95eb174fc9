"""A training loop on a virtual clock: what its steps and saves take is set, so that what is measured can be known."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

from tierfall.core.capture.handle import SaveHandle
from tierfall.core.types.values import CheckpointId, TierKind, survives
from tierfall.core.types.view import TierRules
from tierfall.policies.cadence import CadenceRules
from tierfall.run.cadence import AnnouncedSteps, CadenceClock

HOST = TierRules(name="host", kind=TierKind.HOST, survives=survives(TierKind.HOST, shared=False))
STORE = TierRules(
    name="store", kind=TierKind.OBJECT, survives=survives(TierKind.OBJECT, shared=True)
)


@dataclass
class Loop:
    """Steps take ``step_s``; a save blocks for ``blocked_s``, a tier has it after ``durable_s`` seconds, and each step
    until then takes ``slower_s`` more. Saves wait for the tier one after the other. While ``copies_others``, a tier is
    taking what no save of this loop has made, and steps are slower too. The store gets every ``flush_every``-th."""

    rules: CadenceRules
    step_s: float = 0.5
    blocked_s: float = 0.25
    durable_s: float = 1.0
    slower_s: float = 0.125
    images: int = 2
    copies_others: bool = False
    flush_every: int = 1
    now_s: float = 1000.0
    step: int = 0
    saved: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    handles: list[SaveHandle] = field(default_factory=list)
    most_under_way: int = 0
    others: AnnouncedSteps | None = None
    _due: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cadence = CadenceClock(
            self.rules,
            clock=lambda: self.now_s,
            images=lambda image_bytes: self.images,
            copying=lambda: self.copies_others,
            others=self.others,
        )

    def run(self, steps: int, *, stride: int = 1) -> list[int]:
        """Train so many steps; return the steps that were saved meanwhile."""
        before = len(self.saved)
        for _ in range(steps):
            self._train(stride)
            if self.cadence.is_due(self.step):
                self.save()
        return self.saved[before:]

    def run_to(self, saves: int) -> None:
        """Train until so many saves were made."""
        while len(self.saved) < saves:
            self.run(1)

    def _train(self, stride: int) -> None:
        for _ in range(stride):
            under_way = self.copies_others or any(not h.is_settled() for h in self.handles)
            self.now_s += self.step_s + (self.slower_s if under_way else 0.0)
        self.step += stride
        for handle in self.handles:
            if self._due.get(handle.step, math.inf) <= self.now_s and not handle.done("store"):
                handle.on_committed("store")

    def save(self) -> None:
        """Save here and now, as a call of ``save`` does."""
        flushed = len(self.handles) % self.flush_every == self.flush_every - 1
        handle = SaveHandle(
            CheckpointId(self.step, 1),
            ("store",) if flushed else (),
            in_memory="host",
            clock=lambda: self.now_s,
        )
        self.now_s += self.blocked_s
        handle.on_begun(bytes=1000, lazy=True, blocked_s=self.blocked_s)
        handle.on_captured()
        if flushed:
            last_s = max(self._due.values(), default=0.0)
            self._due[self.step] = max(self.now_s, last_s) + self.durable_s
        self.handles.append(handle)
        self.saved.append(self.step)
        self.times.append(self.now_s)
        under_way = sum(not handle.is_settled() for handle in self.handles)
        self.most_under_way = max(self.most_under_way, under_way)
        self.cadence.on_saved(handle)


def gaps(steps: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(steps)]
