"""``item``: how a user says when an entry of the state may change, and what a change of world size does to it.

It owns the wrapper alone; the walk unwraps it, the fill puts values back through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tierfall.core.errors import ConfigError, NotSupportedError
from tierfall.core.values import Changes


class OnResize(StrEnum):
    """What becomes of an entry when a checkpoint is restored by another number of ranks."""

    RESHARD = "reshard"
    PER_RANK = "per_rank"
    REPLICATE = "replicate"
    DROP = "drop"


@dataclass(slots=True, eq=False)
class Item:
    """An entry of the state with its rules. Not frozen: a restore puts a plain value back into ``value``."""

    value: object
    changes: Changes | None
    on_resize: OnResize


def item(
    value: object,
    *,
    changes: Literal["on_step", "anytime"] | None = None,
    on_resize: Literal["reshard", "per_rank", "replicate", "drop"] = "reshard",
) -> Item:
    """Wrap an entry of ``state`` to say when it may change and what a change of world size does to it.

    Raises ConfigError for an unknown word, NotSupportedError for an ``on_resize`` that is not acted on yet.
    """
    words = [word.value for word in Changes]
    if changes is not None and changes not in words:
        raise ConfigError(f"item: changes={changes!r} is not one of {', '.join(words)}")
    rules = [word.value for word in OnResize]
    if on_resize not in rules:
        raise ConfigError(f"item: on_resize={on_resize!r} is not one of {', '.join(rules)}")
    if OnResize(on_resize) is not OnResize.RESHARD:
        raise NotSupportedError(
            f"item: on_resize={on_resize!r} is not supported yet; leave it out to take the default, 'reshard'"
        )
    return Item(value, None if changes is None else Changes(changes), OnResize(on_resize))


def unwrap(value: object) -> object:
    """Return what stands inside any wrappers."""
    while type(value) is Item:
        value = value.value
    return value
