"""Places in a configuration, and what was found wrong at them.

A place is the way from the top to a value, ``("tiers", 2, "flush", "every")``, and reads ``tiers[2].flush.every``.
"""

from __future__ import annotations

from dataclasses import dataclass

Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a configuration."""

    place: Place
    message: str


def write_place(place: Place) -> str:
    """Write a place as people do; empty for the whole configuration."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return "".join(parts).removeprefix(".")
