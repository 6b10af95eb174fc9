"""The demo's story, act by act: train, kill, look, go on, compare, damage, sum up.

Each act is a function over a ``Stage``. An act that does not show what it is to show raises DemoError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tierfall.core.catalog import Listing, merge
from tierfall.core.units import format_duration, format_share, format_size
from tierfall.core.values import CheckpointId
from tierfall.demo import chain as chains
from tierfall.demo.chain import FAST, HOST, SLOW, Chain
from tierfall.demo.events import Ended, Event, Restored, Started, StepDone
from tierfall.demo.process import DemoError, Trainer
from tierfall.demo.screen import Screen, format_edges

KILL_FROM = 0.5
"""The kill comes after this share of the steps, as soon as a copy is under way to the slow tier."""
KILL_BETWEEN = (0.05, 0.8)
"""The share of a copy that has to have arrived for it to be under way plainly."""


@dataclass(slots=True, kw_only=True)
class Act:
    """What one trainer process told."""

    started: Started | None = None
    steps: list[StepDone] = field(default_factory=list)
    ended: Ended | None = None

    def add(self, event: Event) -> None:
        match event:
            case Started():
                self.started = event
            case StepDone():
                self.steps.append(event)
            case Ended():
                self.ended = event

    @property
    def last(self) -> StepDone | Ended:
        return self.ended or self.steps[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What every act needs."""

    screen: Screen
    chain: Chain
    steps: int
    every: int
    small: bool

    def trainer(self, name: str, *, saves: bool = True) -> Trainer:
        return Trainer(
            name,
            folder=self.chain.logs,
            config=self.chain.config_path if saves else None,
            steps=self.steps,
            small=self.small,
        )

    def show(self, event: Event) -> None:
        """Show a step; between two saves one line is left standing, of a run without saves every fourth."""
        if isinstance(event, StepDone):
            apart = self.every if event.totals else 4 * self.every
            self.screen.step(event, keep=event.step % apart == apart // 2)


# 1 and 2: train, and kill -----------------------------------------------------------------------------


def train_and_kill(stage: Stage) -> tuple[Act, CheckpointId]:
    """Train until a copy is on its way to the slow tier, and kill the trainer there; return what was cut off."""
    act = Act()
    with stage.screen.training(), stage.trainer("first") as trainer:
        for event in trainer.follow():
            act.add(event)
            stage.show(event)
            if not isinstance(event, StepDone) or not _is_ripe(stage, event):
                continue
            if not trainer.freeze():
                break
            cut = _in_flight(stage, event)
            if cut is not None:
                for late in trainer.kill():
                    act.add(late)
                _tell_kill(stage, trainer.pid, cut, event)
                return act, cut
            trainer.thaw()
    raise DemoError(
        f"no copy was found on its way to {SLOW} between step {stage.steps * KILL_FROM:g} and {stage.steps}: this "
        "machine trains faster than the demo thought; run it with more --steps"
    )


def _is_ripe(stage: Stage, event: StepDone) -> bool:
    tier = event.tiers.get(SLOW)
    if tier is None or tier.arriving is None or event.totals is None:
        return False
    low, high = (share * event.totals.image_bytes for share in KILL_BETWEEN)
    return event.step >= KILL_FROM * stage.steps and low <= tier.arrived_bytes <= high


def _in_flight(stage: Stage, event: StepDone) -> CheckpointId | None:
    """Look, while nothing moves, whether the copy is still half there."""
    arriving = event.tiers[SLOW].arriving
    assert arriving is not None
    cut = chains.parse_checkpoint(arriving)
    committed = chains.look(stage.chain)[SLOW].copy(cut) is not None
    return cut if not committed and chains.half_there(stage.chain, SLOW, cut) else None


def _tell_kill(stage: Stage, pid: int, cut: CheckpointId, event: StepDone) -> None:
    assert event.totals is not None
    share = event.tiers[SLOW].arrived_bytes / event.totals.image_bytes
    stage.screen.head(2, "Kill it in the middle of a flush")
    stage.screen.say(
        f"  step {event.step}: {share:.0%} of checkpoint {cut.step} has arrived on {SLOW}. "
        f"[bold red]SIGKILL[/bold red] to process {pid}"
    )


# 3: what is left --------------------------------------------------------------------------------------


def show_what_is_left(stage: Stage, cut: CheckpointId) -> dict[str, Listing]:
    """Print what each tier holds; DemoError where the copy that was cut off counts as a checkpoint."""
    listings = chains.look(stage.chain)
    if listings[SLOW].copy(cut) is not None:
        raise DemoError(f"checkpoint {cut} is committed on {SLOW} although its copy was cut off")
    show_tiers(stage, listings, cut)
    stage.screen.say(
        f"  {SLOW} has no commit record of checkpoint {cut.step}: what arrived counts for nothing"
    )
    return listings


def show_tiers(stage: Stage, listings: dict[str, Listing], cut: CheckpointId | None = None) -> None:
    known = merge(listings.values())
    rows = []
    for checkpoint in known:
        states = [
            str(checkpoint.copies[name].state) if name in checkpoint.copies else "-"
            for name in listings
        ]
        if checkpoint.id == cut:
            states[list(listings).index(SLOW)] = "cut off"
        size = format_size(checkpoint.commit.image_bytes) if checkpoint.commit else "?"
        rows.append([str(checkpoint.id.step), str(checkpoint.id.attempt), size, *states])
    stage.screen.table(["step", "attempt", "size", *listings], rows)


# 4: go on ---------------------------------------------------------------------------------------------


def go_on(stage: Stage, left: dict[str, Listing]) -> Act:
    """Start the trainer again: it restores, finishes what was owed, and trains to the end."""
    act = Act()
    owed = chains.still_owed(stage.chain, left)
    for checkpoint, tier in sorted(owed):
        stage.screen.say(f"  the dead process still owes checkpoint {checkpoint} to {tier}")
    with stage.screen.training(), stage.trainer("again") as trainer:
        for event in trainer.follow():
            act.add(event)
            if isinstance(event, Started):
                _tell_restored(stage, _check_restored(event, merge(left.values())[-1].id))
                continue
            owed -= _tell_adopted(stage, event, owed)
            stage.show(event)
    if owed:
        raise DemoError(f"what the dead process owed was never finished: {sorted(owed)}")
    return act


def _check_restored(event: Started, newest: CheckpointId) -> Restored:
    if event.restored is None:
        raise DemoError(f"the second start restored nothing, though checkpoint {newest} was there")
    if event.restored.step != newest.step:
        raise DemoError(
            f"the second start restored step {event.restored.step}, not {newest.step}, the newest there was"
        )
    return event.restored


def _tell_restored(stage: Stage, restored: Restored) -> None:
    stage.screen.say(
        f"  restored step [bold]{restored.step}[/bold] (attempt {restored.attempt}) "
        f"in {format_duration(restored.seconds)}"
    )
    _tell_sources(stage, restored)


def _tell_sources(stage: Stage, restored: Restored) -> None:
    for shard, tier, count in restored.sources:
        stage.screen.say(f"  {shard}: {format_size(count)} from [bold green]{tier}[/bold green]")


def _tell_adopted(
    stage: Stage, event: StepDone | Ended, owed: set[tuple[str, str]]
) -> set[tuple[str, str]]:
    """Say, and return, which copies that the dead process owed have arrived by now."""
    done = {
        (checkpoint, tier)
        for checkpoint, tier in owed
        if tier in event.tiers and checkpoint in event.tiers[tier].whole
    }
    for checkpoint, tier in sorted(done):
        stage.screen.say(
            f"  [green]finished by adoption: checkpoint {checkpoint} is committed on {tier}[/green]"
        )
    return done


# 5: compare -------------------------------------------------------------------------------------------


def train_undisturbed(stage: Stage) -> Act:
    """Train the same without tierfall and without a kill."""
    act = Act()
    with stage.screen.training(), stage.trainer("undisturbed", saves=False) as trainer:
        for event in trainer.follow():
            act.add(event)
            stage.show(event)
    return act


def compare(stage: Stage, first: Act, again: Act, undisturbed: Act) -> tuple[int, int]:
    """Compare losses and the final state bit for bit; return how many losses before the kill and after the restore.

    DemoError where anything differs.
    """
    expected = {event.step: event.loss for event in undisturbed.steps}
    before = check_equal(first.steps, expected, "before the kill")
    after = check_equal(again.steps, expected, "after the restore")
    assert again.started is not None
    assert again.started.restored is not None
    if after != stage.steps - again.started.restored.step or not after:
        raise DemoError(f"only {after} steps were trained after the restore")
    if _fingerprint(again) != _fingerprint(undisturbed):
        raise DemoError("the losses are equal, but the final model or optimizer state differs")
    stage.screen.say(
        f"  [bold green]equal to the last bit[/bold green]: {after} losses after the restore, {before} before the kill"
    )
    stage.screen.say("  equal too: every byte of model and optimizer state after the last step")
    return before, after


def check_equal(steps: Sequence[StepDone], expected: dict[int, str], when: str) -> int:
    """Return how many losses were compared; DemoError names the first that differs."""
    for event in steps:
        if event.loss != expected.get(event.step):
            raise DemoError(
                f"the loss of step {event.step}, {when}, is {event.loss}; the undisturbed run has "
                f"{expected.get(event.step)}: the continuation is not exact"
            )
    return len(steps)


def _fingerprint(act: Act) -> str:
    if act.ended is None:
        raise DemoError("a trainer ended without saying so; see the logs")
    return act.ended.fingerprint


# 6: damage --------------------------------------------------------------------------------------------


def damage_and_restore(stage: Stage, again: Act) -> Restored:
    """Damage the nearest copy; a fresh process has to restore the same bytes all the same. Returns what it restored."""
    listings = chains.look(stage.chain)
    show_tiers(stage, listings)
    if listings[HOST].copies:
        raise DemoError(f"{HOST} still holds checkpoints after a clean close")
    newest = listings[FAST].copies[-1].id
    path, offset = chains.flip_byte(stage.chain, FAST, newest)
    stage.screen.say(f"  byte {offset} of {path.relative_to(stage.chain.folder)} is flipped")
    act = Act()
    with stage.screen.training(), stage.trainer("damaged") as trainer:
        for event in trainer.follow():
            act.add(event)
    restored = act.started.restored if act.started else None
    if act.started is None or restored is None:
        raise DemoError("nothing was restored from a chain with one damaged byte")
    _check_fell(restored, newest)
    if act.started.fingerprint != _fingerprint(again):
        raise DemoError("what was restored beside the damage is not what was saved")
    stage.screen.say(
        f"  restored step [bold]{restored.step}[/bold] in {format_duration(restored.seconds)}"
    )
    for what, reason in restored.fallbacks:
        stage.screen.say(f"  passed over: [yellow]{what}[/yellow]")
        stage.screen.quote(reason)
    _tell_sources(stage, restored)
    stage.screen.say("  [bold green]the same bytes as were saved[/bold green]")
    return restored


def _check_fell(restored: Restored, newest: CheckpointId) -> None:
    tiers = {tier for _, tier, _ in restored.sources}
    if restored.step != newest.step or SLOW not in tiers or not restored.fallbacks:
        raise DemoError(
            f"with a damaged byte on {FAST}, step {restored.step} was restored from {', '.join(sorted(tiers))}; "
            f"expected step {newest.step}, with what is damaged from {SLOW}, and the reason"
        )


# 7: sum up --------------------------------------------------------------------------------------------


def sum_up(stage: Stage, acts: Sequence[Act]) -> dict[str, Any]:
    """Print, and return, what saving has cost, over both starts."""
    totals = [act.last.totals for act in acts if act.last.totals is not None]
    blocked_s = sum(total.blocked_s for total in totals)
    trained_s = sum(event.seconds for act in acts for event in act.steps)
    saves = sum(total.saves for total in totals)
    edges: dict[str, int] = {}
    for total in totals:
        for edge, count in total.edge_bytes.items():
            edges[edge] = edges.get(edge, 0) + count
    stage.screen.say(
        f"  {saves} saves of {format_size(max(total.image_bytes for total in totals))} blocked "
        f"{format_duration(trained_s)} of training for {format_duration(blocked_s)}: "
        f"[bold]{format_share(blocked_s / trained_s)}[/bold]"
    )
    for line in format_edges(edges):
        stage.screen.say(f"  {line}")
    return {
        "saves": saves,
        "image_bytes": max(total.image_bytes for total in totals),
        "blocked_s": blocked_s,
        "trained_s": trained_s,
        "edge_bytes": edges,
    }
