"""``latest``, ``runs`` and ``schema``: short answers, which scripts use too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from tierfall.cli.common import (
    CommandOutput,
    cell,
    counted,
    load_settings,
    name_other_runs,
    owner_members,
    rough_duration,
    table,
)
from tierfall.cli.run_facts import RunFacts
from tierfall.config import Config
from tierfall.core.types.text import members
from tierfall.core.types.units import format_size
from tierfall.ops.commands import newest_restorable
from tierfall.ops.reader import RunReader, find_runs


def latest(config: Path | None, run: str | None, as_json: bool) -> None:
    """Print the step that a restore would use."""
    settings = load_settings(config, run)
    answer = CommandOutput(as_json)
    with RunReader(settings) as reader:
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(newest_restorable(facts.known)), None)
    if newest is None:
        answer.refuse(
            f"latest: run {settings.run} has no step that can be restored{name_other_runs(settings)}"
        )
    answer.document = {
        "run": settings.run,
        **members(facts.by_id[newest], "id"),
        "tiers": list(facts.by_id[newest].copies),
    }
    answer.show(str(newest))
    answer.finish()


def runs(config: Path | None, as_json: bool) -> None:
    """List all runs on the tiers."""
    settings = load_settings(config, None)
    answer = CommandOutput(as_json)
    names, unread = find_runs(settings)
    answer.note_unread(unread)
    found = [_describe_run(answer, settings, name) for name in names]
    answer.document = {"runs": found}
    right = ("STEPS", "LATEST", "AGE", "SIZE")
    made = table("RUN", *right, "TIERS", "", right=right)
    for one in found:
        made.add_row(
            one["run"],
            str(one["checkpoints"]),
            "-" if one["step"] is None else f"{one['step']}@{one['attempt']}",
            cell(one["age_s"], rough_duration),
            format_size(one["bytes"]),
            ", ".join(one["tiers"]) or "-",
            "a trainer owns it" if one["owner"] else "",
        )
    if found:
        answer.show(made)
    answer.show(counted(len(found), "run", "runs") if found else "no run")
    answer.finish()


def _describe_run(answer: CommandOutput, settings: Config, run: str) -> dict[str, Any]:
    with RunReader(settings.model_copy(update={"run": run})) as reader:
        facts = RunFacts.gather(reader)
    answer.note_unread(facts.unread)
    newest = next(iter(newest_restorable(facts.known)), None)
    held = [listing for listing in facts.listings if listing.copies]
    return {
        "run": run,
        "checkpoints": len(facts.known),
        **members(facts.by_id.get(newest) if newest else None, "id"),
        "age_s": facts.age_s(facts.by_id[newest]) if newest else None,
        "bytes": sum(copy.bytes for listing in held for copy in listing.copies),
        "tiers": [listing.tier for listing in held],
        "owner": owner_members(facts.owner),
    }


def schema() -> None:
    """Print the JSON schema of the YAML file."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))
