"""The story's first half: train, kill in the middle of a flush, look at what is left, go on.

Each act is a function over a ``Stage``. An act that does not show what it is to show raises DemoError.
"""

from __future__ import annotations

import time

from tierfall.core.format.catalog import Listing, merge
from tierfall.core.types.values import CheckpointId
from tierfall.demo import chain as chains
from tierfall.demo.chain import HOST, STORE
from tierfall.demo.events import Ended, Looked, Started, StepDone
from tierfall.demo.process import DemoError
from tierfall.demo.stage import Act, Stage, check_restored, show_tiers, tell_restored

KILL_FROM = 0.5
"""The kill comes after this share of the steps, as soon as a copy is under way to the object tier."""
UNDER_WAY = 0.15
"""The share of a copy that has to be on its way for it to be under way plainly."""
SETTLE_S = 0.2
"""By then a store on this machine has answered what a frozen trainer had asked of it."""


# 1 and 2: train, and kill -----------------------------------------------------------------------------


def train_and_kill(stage: Stage) -> tuple[Act, CheckpointId]:
    """Train until a copy is on its way to the object tier, and kill the trainer there; return what was cut off."""
    with stage.trainer("first") as (trainer, act):
        for event in trainer.follow():
            act.add(event)
            stage.show(event)
            if not isinstance(event, StepDone) or not _is_ripe(stage, event):
                continue
            if not trainer.freeze():
                break
            cut = _in_flight(stage, event)
            if cut is not None:
                act.killed_s = time.monotonic()
                for late in trainer.kill():
                    act.add(late)
                _tell_kill(stage, trainer.pid, cut, event)
                return act, cut
            trainer.thaw()
    raise DemoError(
        f"no copy was found on its way to {STORE} between step {stage.steps * KILL_FROM:g} and {stage.steps}, "
        "though one takes longer than from save to save: run it with more --steps, and with nothing beside it"
    )


def _is_ripe(stage: Stage, event: StepDone) -> bool:
    tier = event.tiers.get(STORE)
    if tier is None or tier.arriving is None or event.totals is None:
        return False
    is_under_way = tier.arrived_bytes >= UNDER_WAY * event.totals.image_bytes
    # A copy begins before its image is sealed, and of one that is not nothing outlives the trainer.
    is_sealed = tier.arriving in event.tiers[HOST].whole
    # Of an older one, two newer would fill what the tier retains: the next start would not send it any more.
    is_wanted = event.step < chains.parse_checkpoint(tier.arriving).step + 4 * stage.every
    return event.step >= KILL_FROM * stage.steps and is_under_way and is_sealed and is_wanted


def _in_flight(stage: Stage, event: StepDone) -> CheckpointId | None:
    """Look, while nothing moves, whether the copy is still half there."""
    arriving = event.tiers[STORE].arriving
    assert arriving is not None
    time.sleep(SETTLE_S)
    cut = chains.parse_checkpoint(arriving)
    return cut if chains.is_cut_off(stage.chain, STORE, cut) else None


def _tell_kill(stage: Stage, pid: int, cut: CheckpointId, event: StepDone) -> None:
    assert event.totals is not None
    share = event.tiers[STORE].arrived_bytes / event.totals.image_bytes
    stage.screen.head(2, "Kill it in the middle of a flush")
    stage.screen.say(
        f"  step {event.step}: {share:.0%} of checkpoint {cut.step} is on its way to {STORE}. "
        f"[bold red]SIGKILL[/bold red] to process {pid}"
    )


# 3: what is left --------------------------------------------------------------------------------------


def show_what_is_left(stage: Stage, cut: CheckpointId) -> dict[str, Listing]:
    """Print what each tier holds; DemoError where the copy that was cut off counts as a checkpoint."""
    listings = chains.look(stage.chain)
    if listings[STORE].copy(cut) is not None:
        raise DemoError(f"checkpoint {cut} is committed on {STORE} although its copy was cut off")
    show_tiers(stage, listings, cut)
    stage.screen.say(
        f"  {STORE} has no commit record of checkpoint {cut.step}: what arrived counts for nothing"
    )
    return listings


# 4: go on ---------------------------------------------------------------------------------------------


def go_on(stage: Stage, left: dict[str, Listing]) -> Act:
    """Start the trainer again: it restores, finishes what was owed, and trains to the end."""
    owed = chains.still_owed(stage.chain, left)
    for checkpoint, tier in sorted(owed):
        stage.screen.say(f"  the dead process still owes checkpoint {checkpoint} to {tier}")
    with stage.trainer("again") as (trainer, act):
        for event in trainer.follow():
            act.add(event)
            if isinstance(event, Started):
                tell_restored(stage, check_restored(act, merge(left.values())[-1].id))
            elif isinstance(event, Looked | StepDone | Ended):
                owed -= _tell_adopted(stage, event, owed)
                stage.show(event)
    if owed:
        raise DemoError(f"what the dead process owed was never finished: {sorted(owed)}")
    return act


def _tell_adopted(
    stage: Stage, event: Looked | StepDone | Ended, owed: set[tuple[str, str]]
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
