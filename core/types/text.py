"""Small words of messages, and values as JSON members; nothing here knows what they are about."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_NAMED_MAX = 8
_VOWELS = ("a", "e", "i", "o", "un")
_OF_IDS = ("id", "checkpoint", "survives")
"""Attributes whose value, a checkpoint's id or None, is written as the members ``step`` and ``attempt``."""


def with_article(noun: str) -> str:
    """Put ``a`` or ``an`` before a noun, by its letters: ``an int``, ``a dict``."""
    return f"{'an' if noun.lower().startswith(_VOWELS) else 'a'} {noun}"


def ranks_named(ranks: Iterable[int]) -> str:
    """Name a few ranks of many: ``rank 3``, ``ranks 2, 3``, ``ranks 0, 1, ... and 4 more``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED_MAX]))}{more}"


def few_of(things: Sequence[str]) -> str:
    """Name a few of many, and say how many more there are."""
    more = len(things) - 4
    return ", ".join(things[:4]) + (f" and {more} more" if more > 0 else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """Word a hint at the known word that was probably meant; empty where none is near."""
    by_shape = {name.lower().replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_shape, n=1, cutoff=0.6)
    return f'; did you mean "{by_shape[near[0]]}"?' if near else ""


def signature_fault(function: Callable[..., Any], expected: str) -> str | None:
    """Say that a function cannot be called with the parameters that ``expected`` lists, such as ``(key, *, length)``:
    those after the star by name, the others by place. None where it can, and where Python does not know its parameters.
    """
    by_place, _, by_name = expected.strip("()").partition("*")
    places = [name for name in by_place.replace(" ", "").split(",") if name]
    names = [name for name in by_name.replace(" ", "").split(",") if name]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins
        return None
    try:
        signature.bind(*places, **dict.fromkeys(names))
    except TypeError:
        bare = (each.replace(annotation=each.empty) for each in signature.parameters.values())
        return f"it takes ({', '.join(map(str, bare))}); expected {expected}"
    return None


def float_to_json(value: float) -> float | str:
    """Write a float so that every value survives JSON, not-a-number and infinities included."""
    return value if math.isfinite(value) else repr(value)


def members(value: Any, *names: str) -> dict[str, Any]:
    """Write the attributes ``names`` of a value, or all fields of a dataclass, as JSON members in that order.

    Each of them is None where the value is. Text stands for errors and paths, a sorted list for a set.
    """
    found: dict[str, Any] = {}
    for name in names or [each.name for each in fields(value)]:
        member = None if value is None else getattr(value, name)
        if name in _OF_IDS:
            found |= members(member, "step", "attempt")
        else:
            found[name] = to_json(member)
    return found


def to_json(value: Any) -> Any:
    """Write a value as JSON has it; dataclasses by their ``members``."""
    match value:
        case Enum():
            return str(value)
        case None | str() | int():
            return value
        case float():
            return float_to_json(value)
        case Mapping():
            return {str(key): to_json(each) for key, each in value.items()}
        case frozenset() | set():
            return [to_json(each) for each in sorted(value)]
        case list() | tuple():
            return [to_json(each) for each in value]
    return members(value) if is_dataclass(value) else str(value)
