"""What a tier's storage is like at a time: calm, with faults now and then, or gone for some minutes."""

from __future__ import annotations

import random
from typing import Any

from tierfall.backends.faults import Fault, FaultKind, Faulty, Operation
from tierfall.core.contracts import Backend
from tierfall.core.errors import AccessDeniedError

KEYS = "run/step-*"


class Weather:
    """A backend that can be switched between its faults and none."""

    def __init__(self, inner: Backend, faulty: Faulty) -> None:
        self._inner, self._faulty = inner, faulty
        self.bad = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._faulty if self.bad else self._inner, name)


class Outage(Weather):
    """A backend with its faults, none, or an answer to nothing. ``denied``: it takes no image, and says that this will
    not pass; ``blocked`` are folders where nothing can be made, as if a link or a file stood in their place."""

    def __init__(self, inner: Backend, faulty: Faulty, silent: Faulty) -> None:
        super().__init__(inner, faulty)
        self._silent = silent
        self.down = self.denied = False
        self.blocked: set[str] = set()

    def create(self, key: str, **options: Any) -> Any:
        if key.startswith(tuple(self.blocked)) or (self.denied and "/rank-" in key):
            raise AccessDeniedError(f"create {key!r}: not here")
        return self.__getattr__("create")(key, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._silent, name) if self.down else super().__getattr__(name)


def draw_faults(draw: random.Random, inner: Backend, seed: int) -> Faulty:
    """Calm, a few faults, or many: before and after the fact, torn writes, flipped bits on the way back."""
    chance = draw.choice((0.0, 0.02, 0.02, 0.15))
    kinds = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)
    plan = [
        Fault(kind=kind, operation=operation, keys=KEYS, chance=chance, times=None)
        for kind in kinds
        for operation in Operation
    ]
    for kind, operation in (
        (FaultKind.TORN_WRITE, Operation.WRITE),
        (FaultKind.LOST_SYNC, Operation.PUBLISH),
        (FaultKind.BIT_FLIP, Operation.READ),
    ):
        plan.append(Fault(kind=kind, operation=operation, keys=KEYS, chance=chance, times=None))
    return Faulty(inner, seed=seed, plan=plan)
