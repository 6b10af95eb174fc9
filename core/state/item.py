"""``item``: how a user says when an entry of the state may change, and what a change of world size does to it.

It owns the wrapper alone; the walk unwraps it, the fill puts values back through it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tierfall.core.tensors import names, value_codec
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import Changes


class OnResize(StrEnum):
    """What becomes of an entry when a checkpoint is restored by another number of ranks: it is resharded, and refused
    where it cannot be; each rank takes what the rank of its number had, and a new rank keeps its own; all take what the
    first had; or all keep their own."""

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

    ``on_resize`` counts where another number of ranks saved than restores: ``reshard`` puts tensors together and
    refuses values that differed between ranks; ``per_rank`` gives each rank what the rank of its number had (a new rank
    keeps its own), ``replicate`` gives all what rank 0 had, ``drop`` lets all keep their own. Raises ConfigError for an
    unknown word.
    """
    words = [word.value for word in Changes]
    if changes is not None and changes not in words:
        raise ConfigError(f"item: changes={changes!r} is not one of {', '.join(words)}")
    rules = [word.value for word in OnResize]
    if on_resize not in rules:
        raise ConfigError(f"item: on_resize={on_resize!r} is not one of {', '.join(rules)}")
    return Item(value, None if changes is None else Changes(changes), OnResize(on_resize))


def unwrap(value: object) -> object:
    """Return what stands inside any wrappers."""
    while type(value) is Item:
        value = value.value
    return value


def resize_rules(state: object, name: str = "", depth: int = 0) -> dict[str, OnResize]:
    """Return, by name, what the wrappers in a state say of a change of world size, where it is not the default."""
    rules: dict[str, OnResize] = {}
    if type(state) is Item:
        if state.on_resize is not OnResize.RESHARD:
            rules[name] = state.on_resize
        rules.update(resize_rules(state.value, name, depth + 1))
    elif depth <= value_codec.DEPTH_MAX and type(state) in value_codec.MAPPINGS:
        for key, value in state.items():  # type: ignore[attr-defined]
            # a key that no state may have, which its plan says
            with suppress(value_codec.NotEncodableError):
                part = names.part(key)
                rules.update(resize_rules(value, names.join(name, part), depth + 1))
    elif depth <= value_codec.DEPTH_MAX and type(state) in (list, tuple):
        for index, value in enumerate(state):  # type: ignore[arg-type]
            rules.update(resize_rules(value, f"{name}.{index}", depth + 1))
    return rules
