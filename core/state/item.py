"""``item``: a wrapper that declares when an entry of the state may change, and what a change of world size does to it.

The walk unwraps it; a restore assigns plain values through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tierfall.core.runtime.public_calls import public_call
from tierfall.core.tensors import builtin_codecs, dtensor, names, value_codec
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.values import Changes


class OnResize(StrEnum):
    """How an entry is restored with another world size: resharded, or refused if that is impossible; from the rank of
    the same number, where a new rank keeps its own value; from rank 0; or not at all."""

    RESHARD = "reshard"
    PER_RANK = "per_rank"
    REPLICATE = "replicate"
    DROP = "drop"


@dataclass(slots=True, eq=False)
class Item:
    """An entry of the state with its rules. Not frozen: a restore assigns plain values to ``value``."""

    value: object
    changes: Changes | None
    on_resize: OnResize


def item(
    value: object,
    *,
    changes: Literal["on_step", "anytime"] | None = None,
    on_resize: Literal["reshard", "per_rank", "replicate", "drop"] = "reshard",
) -> Item:
    """Wrap an entry of ``state`` to declare when it may change, and what a change of world size does to it.

    ``on_resize`` applies if the world size differs between save and restore. ``reshard`` merges and divides tensors,
    and refuses values that differed between ranks. With ``per_rank``, each rank restores the value of the rank of its
    number, and a new rank keeps its own; with ``replicate``, all restore rank 0's; with ``drop``, all keep their own.
    ConfigError for an unknown word.
    """
    words = [word.value for word in Changes]
    if changes is not None and changes not in words:
        raise ConfigError(f"item: changes={changes!r} is not one of {', '.join(words)}")
    rules = [word.value for word in OnResize]
    if on_resize not in rules:
        raise ConfigError(f"item: on_resize={on_resize!r} is not one of {', '.join(rules)}")
    return Item(value, None if changes is None else Changes(changes), OnResize(on_resize))


register_codec = public_call(value_codec.register_codec)
block = public_call(dtensor.block)
"""Public calls: ``core.tensors`` cannot import those."""


def unwrap(value: object) -> object:
    """The value inside any number of wrappers."""
    while type(value) is Item:
        value = value.value
    return value


def visit_state(
    value: object, name: str = "", depth: int = 0, *, without: Collection[object] = ()
) -> Iterator[tuple[str, object]]:
    """Yield a value of a state and what is in its plain containers and wrappers, each with its name, except for values
    of the types ``without``. A key that no checkpoint can have is left out: the walk refuses it, with its path."""
    yield name, value
    if type(value) is Item:
        yield from visit_state(value.value, name, depth + 1, without=without)
    elif depth <= value_codec.DEPTH_MAX:
        is_mapping = type(value) in value_codec.MAPPINGS
        for key, child in value_codec.children(value):
            if type(child) in without:
                continue
            try:
                part = names.component(key) if is_mapping else str(key)
            except builtin_codecs.NotEncodableError:
                continue
            yield from visit_state(child, names.join(name, part), depth + 1, without=without)


def resize_rules(state: object) -> dict[str, OnResize]:
    """The ``on_resize`` rules of a state by name, without defaults."""
    items = ((name, value) for name, value in visit_state(state) if type(value) is Item)
    return {n: each.on_resize for n, each in items if each.on_resize is not OnResize.RESHARD}
