"""Cadence: whether a step is saved. Pure."""

from __future__ import annotations


def should_save(step: int, *, every_steps: int) -> bool:
    """Say whether ``step`` is one of every ``every_steps``: with 100, steps 100, 200 and so on, never step 0."""
    return step > 0 and step % every_steps == 0
