"""``check``: is the file right, is every tier there, how fast is it, what does it promise, what does a day bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console

from tierfall.cli import losses
from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    Exit,
    JsonOption,
    RunOption,
    counted,
    load_settings,
    of_tier,
    refuse,
    table,
    watched,
)
from tierfall.cli.facts import RunFacts
from tierfall.cli.foreseeing import ForecastInputs, foresee
from tierfall.config import Config
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.text import members, to_json
from tierfall.core.types.units import format_duration, format_rate, format_size, parse_size
from tierfall.ops.commands import notes_on_metrics
from tierfall.ops.measure import SIZE_MAX_BYTES, TierMeasurement, measure
from tierfall.ops.reader import RunReader


def check(
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="How much to write to each tier.")
    ] = "64MiB",
    image: Annotated[
        str | None,
        typer.Option("--image", metavar="SIZE", help="For the forecast: one rank's image."),
    ] = None,
    save_every: Annotated[
        str | None,
        typer.Option("--save-every", metavar="TIME", help="For the forecast: from save to save."),
    ] = None,
    step_time: Annotated[
        str | None,
        typer.Option("--step-time", metavar="TIME", help="For the forecast: one training step."),
    ] = None,
    steps_per_hour: Annotated[
        float | None,
        typer.Option("--steps-per-hour", metavar="N", help="The same, the other way round."),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="For the forecast: all ranks.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="For the forecast: their nodes.")
    ] = None,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the file, open and measure every tier with real bytes, which are removed again, and foresee a day."""
    settings = load_settings(config, run)
    size_bytes = _size(size)
    wishes = ForecastInputs.read(
        image=image,
        save_every=save_every,
        step_time=step_time,
        steps_per_hour=steps_per_hour,
        ranks=ranks,
        nodes=nodes,
    )
    answer = CommandOutput(as_json)
    console = Console(stderr=False)
    with console.status("check", spinner="line") if watched(as_json) else _Silent() as status:
        tiers = measure(settings, size_bytes, lambda name: status.update(f"check: {name}"))
    answer.document = {
        "run": settings.run,
        "size_bytes": size_bytes,
        "tiers": [members(tier) for tier in tiers],
    }
    _show(answer, tiers, size_bytes)
    foresee(answer, settings, tiers, wishes)
    _report_loss_bounds(answer, settings, tiers)
    answer.finish()


def _report_loss_bounds(
    answer: CommandOutput, settings: Config, tiers: Sequence[TierMeasurement]
) -> None:
    """Say what survives each loss, where a run has saved, how long reading it takes at the measured rates, and which
    metrics none of its checkpoints has."""
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
    rates = {t.name: t.read_bytes_per_s for t in tiers if t.read_bytes_per_s is not None}
    bounds = losses.known_bounds(replace(facts.safety, read_bytes_per_s=rates))
    saved = any(bound.survives for bound in bounds.values())
    answer.document["loss_bound"] = to_json(bounds) if saved else None
    if saved:
        answer.show("", losses.format_bounds(bounds, tuple(facts.unread)))
    answer.document["notes"] = notes = notes_on_metrics(settings, facts.listings)
    answer.show(*notes)


class _Silent:
    """Stands where nobody watches."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *error: object) -> None: ...

    def update(self, what: str) -> None: ...


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ConfigError as error:
        refuse(f"--size: {error}", Exit.USAGE)
    if not 0 < size_bytes <= SIZE_MAX_BYTES:
        most = format_size(SIZE_MAX_BYTES)
        refuse(f"--size: {text!r} makes no measurement; expected up to {most}", Exit.USAGE)
    return size_bytes


def _show(answer: CommandOutput, tiers: tuple[TierMeasurement, ...], size_bytes: int) -> None:
    right = ("WRITE", "READ", "ROUND TRIP", "FREE", "CAPACITY")
    made = table("TIER", "KIND", *right, "PLACE", right=right)
    for tier in tiers:
        made.add_row(
            tier.name,
            str(tier.kind),
            _rate(tier.write_bytes_per_s),
            _rate(tier.read_bytes_per_s),
            "-" if tier.round_trip_s is None else format_duration(tier.round_trip_s),
            _bytes(tier.free_bytes),
            _bytes(tier.capacity_bytes),
            tier.place,
        )
    answer.show(made)
    for tier in tiers:
        if tier.durable is not None:
            answer.show(f"{tier.name}: {', '.join(_promises(tier))}")
        if tier.read_only:
            answer.show(
                f"{tier.name}: read-only: it is restored from, and nothing is flushed to it"
            )
        if tier.error is not None:
            answer.problem(of_tier(tier.name, tier.error))
    good = sum(tier.error is None for tier in tiers)
    answered = f"{good} of {counted(len(tiers), 'tier', 'tiers')} answered"
    answer.show(f"{answered}; measured with {format_size(size_bytes)} each")


def _promises(tier: TierMeasurement) -> list[str]:
    durable = "durable" if tier.durable else "NOT durable: a power cut may take what was written"
    fenced = (
        "zombies are fenced"
        if tier.fenced
        else "zombies are NOT fenced: an earlier start that still lives may commit there"
    )
    direct = "direct I/O" if tier.direct_io else "no direct I/O"
    if not tier.direct_io and tier.kind != "object":
        direct += ", so reads may come from the page cache"
    return [durable, fenced, direct]


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else format_rate(bytes_per_s)


def _bytes(count: int | None) -> str:
    return "-" if count is None else format_size(count)
