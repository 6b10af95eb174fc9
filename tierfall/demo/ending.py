"""The story's end: the comparison with an undisturbed training, bit for bit, and what saving has cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tierfall.core.types.units import format_duration, format_rate, format_share, format_size
from tierfall.demo.events import Packed, StepDone, Totals
from tierfall.demo.process import DemoError
from tierfall.demo.screen import format_edges
from tierfall.demo.stage import Act, Stage


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
    if again.fingerprint != undisturbed.fingerprint:
        raise DemoError("the losses are equal, but the final model or optimizer state differs")
    stage.screen.say(
        f"  [bold green]equal to the last bit[/bold green]: {after} losses after the restore, {before} before the kill"
    )
    stage.screen.say("  equal too: every byte of model and optimizer state after the last step")
    return before, after


def check_equal(steps: Sequence[StepDone], expected: Mapping[int, str], when: str) -> int:
    """Return how many losses were compared; DemoError names the first that differs."""
    for event in steps:
        if event.loss != expected.get(event.step):
            raise DemoError(
                f"the loss of step {event.step}, {when}, is {event.loss}; the undisturbed run has "
                f"{expected.get(event.step)}: the continuation is not exact"
            )
    return len(steps)


def sum_up(stage: Stage, acts: Sequence[Act]) -> dict[str, Any]:
    """Print, and return, what saving has cost, over all starts that saved."""
    totals = [act.last.totals for act in acts if act.last.totals is not None]
    image_bytes = max(total.image_bytes for total in totals)
    blocked_s = sum(total.blocked_s for total in totals)
    trained_s = sum(event.seconds for act in acts for event in act.steps)
    saves = sum(total.saves for total in totals)
    edges = _added_edges(totals)
    packed = _added_packed(totals)
    stage.screen.say(
        f"  {saves} saves of {format_size(image_bytes)} blocked {format_duration(trained_s)} of training for "
        f"{format_duration(blocked_s)}: [bold]{format_share(blocked_s / trained_s)}[/bold]"
    )
    for line in format_edges(edges):
        stage.screen.say(f"  {line}")
    for tier, one in packed.items():
        stage.screen.say(f"  {tier} {_describe_packed(one)}")
    return {
        "saves": saves,
        "image_bytes": image_bytes,
        "blocked_s": blocked_s,
        "trained_s": trained_s,
        "edge_bytes": edges,
        "packed": {tier: asdict(one) for tier, one in packed.items()},
    }


def _describe_packed(one: Packed) -> str:
    """``packed 186 MiB into 156 MiB: 1.2 to 1, 340 MB/s a thread``."""
    return (
        f"packed {format_size(one.raw_bytes)} into {format_size(one.stored_bytes)}: "
        f"[bold]{one.raw_bytes / one.stored_bytes:.3g} to 1[/bold], {format_rate(one.raw_bytes / one.seconds)} a thread"
    )


def _added_edges(totals: Sequence[Totals]) -> dict[str, int]:
    edges: dict[str, int] = {}
    for total in totals:
        for edge, count in total.edge_bytes.items():
            edges[edge] = edges.get(edge, 0) + count
    return edges


def _added_packed(totals: Sequence[Totals]) -> dict[str, Packed]:
    """Add up what each tier packed; one that has packed nothing is left out."""
    added: dict[str, Packed] = {}
    for total in totals:
        for tier, one in total.packed.items():
            sofar = added.get(tier, Packed(raw_bytes=0, stored_bytes=0, seconds=0.0))
            added[tier] = Packed(
                raw_bytes=sofar.raw_bytes + one.raw_bytes,
                stored_bytes=sofar.stored_bytes + one.stored_bytes,
                seconds=sofar.seconds + one.seconds,
            )
    return {tier: one for tier, one in added.items() if one.stored_bytes}
