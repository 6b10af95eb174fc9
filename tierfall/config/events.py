"""The section of the YAML file about the event log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from tierfall.config.fields import Folder, Size, wrong
from tierfall.config.sections import Section
from tierfall.core.types.units import format_size

MAX_BYTES_LEAST = 64 << 10
RANK, RUN = "{rank}", "{run}"
_EXPECTED_FILE = f"a file such as ./events.jsonl, with {RANK} and {RUN} to be filled in"
_ADDRESS = re.compile(r"/[a-z][a-z0-9+.-]+:/")
_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def _known_placeholders(path: Path) -> Path:
    if _ADDRESS.search(str(path)):  # // has become / by now
        raise wrong(
            f"an address cannot be appended to; expected {_EXPECTED_FILE}", expected=_EXPECTED_FILE
        )
    for found in _PLACEHOLDER.findall(str(path)):
        if found not in (RANK, RUN):
            raise wrong(
                f'"{found}" is not filled in; expected {_EXPECTED_FILE}', expected=_EXPECTED_FILE
            )
    return path


def _large_enough(max_bytes: int) -> int:
    if max_bytes < MAX_BYTES_LEAST:
        expected = f"{format_size(MAX_BYTES_LEAST)} or more"
        raise wrong(f"{max_bytes} bytes hold too little; expected {expected}", expected=expected)
    return max_bytes


class EventsSection(Section):
    """A log of what happens, a line of JSON each."""

    path: Annotated[Folder, AfterValidator(_known_placeholders)] = Field(
        description="The file. {run} stands for the run's name. Rank 0 writes it, for all; with {rank} in it every "
        "rank writes one of its own.",
        examples=["./events.jsonl"],
    )
    max_bytes: Annotated[Size, AfterValidator(_large_enough)] = Field(
        default=64 << 20,
        alias="max",
        description="The most that it takes on the disk, 64KiB or more: at half of that the file is renamed, to the "
        "same name with .1 behind it, over the one before.",
        examples=["64MiB"],
        json_schema_extra={"default": "64MiB"},
    )

    def file_of(self, *, run: str, rank: int) -> Path | None:
        """Name the file that a rank writes; None where it writes none."""
        text = str(self.path)
        if rank != 0 and RANK not in text:
            return None
        return Path(text.replace(RUN, run).replace(RANK, str(rank)))


def expand_events(value: object) -> object:
    """Let a path alone stand for the section."""
    return {"path": value} if isinstance(value, str | Path) else value
