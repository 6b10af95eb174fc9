"""``export``: write a checkpoint, or a part of it, as a file that needs no tierfall to be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tierfall.cli.common import (
    CommandOutput,
    ConfigOption,
    JsonOption,
    RunOption,
    StepArgument,
    check_tier,
    counted,
    load_settings,
    parse_step,
    watched,
)
from tierfall.cli.progress import ProgressBar
from tierfall.cli.unread import find_certain, naming_unread_tiers
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.core.types.values import CheckpointId
from tierfall.export.export import ExportFormat, ExportOptions, ExportResult
from tierfall.export.export import export as export_checkpoint
from tierfall.ops.reader import RunReader


def export(
    step: StepArgument,
    to: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="The folder to write into; made if missing.")
    ],
    format: Annotated[
        ExportFormat,
        typer.Option(
            "--format",
            help="safetensors, torch for torch.load, or dcp for torch.distributed.checkpoint: DIR itself.",
        ),
    ] = ExportFormat.SAFETENSORS,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="PREFIX", help="Export this part alone: model. May be given again."
        ),
    ] = None,
    tier: Annotated[
        str | None, typer.Option("--tier", metavar="NAME", help="Read from this tier only.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a file of that name that is there.")
    ] = False,
    config: ConfigOption = None,
    run: RunOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint as one file, or as a folder of DCP, from the fastest good copy; every chunk is verified."""
    settings = load_settings(config, run)
    named = parse_step(step)
    check_tier(settings, tier)
    answer = CommandOutput(as_json)
    wish = ExportOptions(to=to.expanduser(), format=format, only=tuple(only or ()), replace=force)
    with RunReader(settings) as reader:
        listings = reader.list()
        checkpoint = find_certain(answer, listings, named, tier, doing="export")
        held = [listing.tier for listing in listings if listing.tier in checkpoint.copies]
        tiers = [name for name in held if tier in (None, name)]
        with (
            naming_unread_tiers(answer, listings, lambda: _dropped(reader, checkpoint.id, tiers)),
            ProgressBar("export", 0, shown=watched(as_json)) as watch,
        ):
            exported = export_checkpoint(checkpoint, tiers, reader.opener(), wish, watch.set)
    _answer(answer, settings.run, exported)
    answer.finish()


def _dropped(reader: RunReader, id: CheckpointId, tiers: Sequence[str]) -> str:
    """Say so where none of the tiers that held a checkpoint has a commit record of it any more."""
    again = [listing for listing in reader.list() if listing.tier in tiers]
    if any(listing.error is not None or listing.copy(id) is not None for listing in again):
        return ""
    return f"export: {id} was dropped while it was read"


def _answer(answer: CommandOutput, run: str, exported: ExportResult) -> None:
    answer.document = {"run": run, **members(exported)}
    tensors = counted(exported.tensors, "tensor", "tensors")
    answer.show(
        f"exported {exported.id} from {', '.join(exported.sources)} to {exported.path}: {tensors}, "
        f"{format_size(exported.bytes)}"
    )
    answer.show(*(f"passed over: {f.what}: {f.reason}" for f in exported.fallbacks))
    answer.show(*(f"note: {note}" for note in exported.notes))
