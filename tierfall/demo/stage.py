"""What the acts of the demo's story share: the stage they play on, what a trainer told, and how both are shown."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierfall.core.format.catalog import Listing, merge
from tierfall.core.types.units import format_duration, format_size
from tierfall.core.types.values import CheckpointId
from tierfall.demo.chain import STORE, Chain
from tierfall.demo.events import (
    Ended,
    Event,
    Looked,
    Restored,
    Saved,
    Started,
    StepDone,
    TierNow,
)
from tierfall.demo.process import DemoError, Trainer
from tierfall.demo.screen import Screen


@dataclass(slots=True, kw_only=True)
class Act:
    """What one trainer process told, and when it was begun and over, on the monotonic clock.

    ``saves`` holds, by checkpoint, the last that was told of each; ``looks`` what the tiers held, by when. ``killed_s``
    is set where it was killed.
    """

    began_s: float
    over_s: float = 0.0
    killed_s: float | None = None
    started: Started | None = None
    steps: list[StepDone] = field(default_factory=list)
    saves: dict[str, Saved] = field(default_factory=dict)
    looks: list[tuple[float, Mapping[str, TierNow]]] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Event) -> None:
        if isinstance(event, Looked | StepDone | Ended):
            self.looks.append((event.time_s, event.tiers))
        match event:
            case Started():
                self.started = event
            case StepDone():
                self.steps.append(event)
            case Saved():
                self.saves[event.checkpoint] = event
            case Ended():
                self.ended = event

    @property
    def last(self) -> StepDone | Ended:
        return self.ended or self.steps[-1]

    @property
    def fingerprint(self) -> str:
        """The digest of what it ended with."""
        if self.ended is None:
            raise DemoError("a trainer ended without saying so; see the logs")
        return self.ended.fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What every act needs."""

    screen: Screen
    chain: Chain
    steps: int
    every: int
    small: bool
    pace_s: float = 0.0
    """The seconds that a step takes at least while it saves."""

    def start(self, name: str, *, saves: bool = True) -> Trainer:
        """Start a trainer process, which is killed where its ``with`` is left before its end."""
        return Trainer(
            name,
            folder=self.chain.logs,
            config=self.chain.config_path if saves else None,
            steps=self.steps,
            small=self.small,
            pace_s=self.pace_s if saves else 0.0,
        )

    @contextmanager
    def trainer(self, name: str) -> Iterator[tuple[Trainer, Act]]:
        """Start a trainer process for an act that listens to it; at the end it is over, one way or the other."""
        with self.start(name) as trainer, self.screen.training():
            act = Act(began_s=trainer.began_s)
            yield trainer, act
        act.over_s = time.monotonic()

    def play(self, name: str) -> Act:
        """Let a trainer run to its end."""
        return self.follow(self.start(name))

    def follow(self, trainer: Trainer) -> Act:
        """Show what a trainer has done and does, to its end."""
        act = Act(began_s=trainer.began_s)
        with trainer, self.screen.training():
            for event in trainer.follow():
                act.add(event)
                self.show(event)
        act.over_s = time.monotonic()
        return act

    def show(self, event: Event) -> None:
        """Show a step; between two saves one line is left standing, of a run without saves every fourth."""
        if isinstance(event, StepDone):
            apart = self.every if event.totals else 4 * self.every
            self.screen.step(event, keep=event.step % apart == apart // 2)


def show_tiers(stage: Stage, listings: dict[str, Listing], cut: CheckpointId | None = None) -> None:
    """Print which tier holds what; ``cut`` is a copy that never arrived on the object tier."""
    rows = []
    for checkpoint in merge(listings.values()):
        states = [
            str(checkpoint.copies[name].state) if name in checkpoint.copies else "-"
            for name in listings
        ]
        if checkpoint.id == cut:
            states[list(listings).index(STORE)] = "cut off"
        size = format_size(checkpoint.commit.image_bytes) if checkpoint.commit else "?"
        rows.append([str(checkpoint.id.step), str(checkpoint.id.attempt), size, *states])
    stage.screen.table(["step", "attempt", "size", *listings], rows)


def tell_restored(stage: Stage, restored: Restored) -> None:
    """Print what was restored, what was passed over for it, and where the bytes came from."""
    stage.screen.say(
        f"  restored step [bold]{restored.step}[/bold] (attempt {restored.attempt}) "
        f"in {format_duration(restored.seconds)}"
    )
    for what, reason in restored.fallbacks:
        stage.screen.say(f"  passed over: [yellow]{what}[/yellow]")
        stage.screen.quote(reason)
    for shard, tier, count in restored.sources:
        stage.screen.say(f"  {shard}: {format_size(count)} from [bold green]{tier}[/bold green]")


def check_restored(act: Act, newest: CheckpointId) -> Restored:
    """Return what a start restored; DemoError where that is not ``newest``."""
    restored = act.started.restored if act.started else None
    if restored is None:
        raise DemoError(f"a start restored nothing, though checkpoint {newest} was there")
    if (restored.step, restored.attempt) != (newest.step, newest.attempt):
        raise DemoError(
            f"a start restored step {restored.step} of attempt {restored.attempt}, not {newest}, the newest there was"
        )
    return restored
