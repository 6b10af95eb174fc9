"""The story's middle: a byte goes bad, and then the whole node is lost; a fresh process restores all the same.

Each act restores in a new process and compares what it holds, by digest, with what was saved.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from tierfall.core.types.values import CheckpointId
from tierfall.demo import chain as chains
from tierfall.demo.chain import FAST, HOST, STORE
from tierfall.demo.events import Restored
from tierfall.demo.process import DemoError
from tierfall.demo.stage import Act, Stage, check_restored, show_tiers, tell_restored

SAME_BYTES = "  [bold green]the same bytes as were saved[/bold green]"


def damage_and_restore(stage: Stage, saved: str) -> tuple[Act, float]:
    """Damage the nearest copy; a fresh process has to restore the same bytes, whose digest is ``saved``.

    Returns, too, when it was damaged, on the monotonic clock.
    """
    listings = chains.look(stage.chain)
    show_tiers(stage, listings)
    if listings[HOST].copies:
        raise DemoError(f"{HOST} still holds checkpoints after a clean close")
    newest = listings[FAST].copies[-1].id
    path, offset = chains.flip_byte(stage.chain, FAST, newest)
    damaged_s = time.monotonic()
    stage.screen.say(f"  byte {offset} of {path.relative_to(stage.chain.folder)} is flipped")
    act = stage.play("damaged")
    restored = check_restored(act, newest)
    check_fell(restored)
    _check_same(act, saved)
    tell_restored(stage, restored)
    stage.screen.say(SAME_BYTES)
    return act, damaged_s


def check_fell(restored: Restored) -> None:
    """DemoError where nothing came from the object tier, or it is not said why."""
    tiers = _tiers(restored)
    if STORE not in tiers or not restored.fallbacks:
        raise DemoError(
            f"with a damaged byte on {FAST}, step {restored.step} was restored from {', '.join(sorted(tiers))}; "
            f"expected what is damaged from {STORE}, and the reason"
        )


def lose_node_and_restore(stage: Stage, saved: str) -> tuple[Act, float]:
    """Lose what lies on this node; a fresh process has to restore the same bytes from the object tier alone.

    Returns, too, when the node was lost, on the monotonic clock.
    """
    newest = lose_node(stage)
    lost_s = time.monotonic()
    act = stage.play("elsewhere")
    restored = check_restored(act, newest)
    check_came_from(restored, {STORE})
    _check_same(act, saved)
    tell_restored(stage, restored)
    stage.screen.say(SAME_BYTES)
    return act, lost_s


def lose_node(stage: Stage) -> CheckpointId:
    """Remove host memory and the file tier's folder; return the newest that is left.

    DemoError where something is left anywhere but on the object tier, or nothing there.
    """
    chains.lose_node(stage.chain)
    listings = chains.look(stage.chain)
    left = [name for name, listing in listings.items() if listing.copies]
    if left != [STORE]:
        raise DemoError(
            f"with the node lost, only {STORE} should hold checkpoints; found some on: {', '.join(left) or 'no tier'}"
        )
    stage.screen.say(f"  host memory and the folder {FAST}/ are removed; {STORE} alone is left")
    return listings[STORE].copies[-1].id


def check_came_from(restored: Restored, expected: Collection[str]) -> None:
    """DemoError where bytes came from any other tier."""
    tiers = _tiers(restored)
    if tiers != set(expected):
        raise DemoError(
            f"step {restored.step} was restored from {', '.join(sorted(tiers))}; expected {', '.join(expected)} alone"
        )


def _check_same(act: Act, saved: str) -> None:
    assert act.started is not None
    if act.started.fingerprint != saved:
        raise DemoError("what was restored is not what was saved")


def _tiers(restored: Restored) -> set[str]:
    return {tier for _, tier, _ in restored.sources}
