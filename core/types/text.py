"""Parts of messages, and values as JSON members."""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_NAMED_MAX = 8
_VOWELS = ("a", "e", "i", "o", "un")
_OF_IDS = ("id", "checkpoint", "survives")
"""Attributes that hold a checkpoint's id or None, written as the members ``step`` and ``attempt``."""


_USER = re.compile(r"\b((?!file:)[A-Za-z][A-Za-z0-9+.-]+:/{1,2})[^\s'\"]*@")
_hidden: dict[str, str] = {}
"""Addresses from the environment, each with the text of the configuration that stands for it."""


def hide_address(address: str, text: str) -> None:
    """Have messages show ``text`` in place of an address that came from the environment."""
    _hidden[address] = text


def without_secrets(message: str) -> str:
    """Return a message without addresses that came from the environment, and without user and password of others."""
    for address in sorted(_hidden, key=len, reverse=True):
        message = message.replace(address, _hidden[address])
    return _USER.sub(r"\1...@", message) if "@" in message else message


def with_article(noun: str) -> str:
    """Prepend ``a`` or ``an``, chosen by spelling: ``an int``, ``a dict``."""
    return f"{'an' if noun.lower().startswith(_VOWELS) else 'a'} {noun}"


def first_sentence(error: object) -> str:
    """Return the first sentence of an error: what is wrong. The sentences after it say what to do."""
    return str(error).partition(". ")[0]


def format_ranks(ranks: Iterable[int]) -> str:
    """Format at most 8 ranks: ``rank 3``, ``ranks 2, 3``, ``ranks 0, 1, ... and 4 more``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _NAMED_MAX} more" if len(ranks) > _NAMED_MAX else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED_MAX]))}{more}"


def format_some(items: Sequence[str]) -> str:
    """Format the first 4 of a list, and the number of the others."""
    more = len(items) - 4
    return ", ".join(items[:4]) + (f" and {more} more" if more > 0 else "")


def hint_at(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that was probably meant, to append to a message; empty if none is similar. A key with a
    value in it lacks its colon."""
    first, _, value = word.partition(" ")
    if value and first in (known := list(known)):
        return f'; is the colon missing? "{first}: {value}"'
    by_shape = {name.lower().replace("-", "_"): name for name in known}
    near = difflib.get_close_matches(word.lower().replace("-", "_"), by_shape, n=1, cutoff=0.6)
    return f'; did you mean "{by_shape[near[0]]}"?' if near else ""


def signature_fault(function: Callable[..., Any], expected: str) -> str | None:
    """Describe why a function cannot be called with the parameters ``expected``, such as ``(key, *, length)``: those
    after the star by keyword, the others by position. None if it can, or if its signature is unknown."""
    positional, keywords = (
        [name for name in part.replace(" ", "").split(",") if name]
        for part in expected.strip("()").partition("*")[::2]
    )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins
        return None
    try:
        signature.bind(*positional, **dict.fromkeys(keywords))
    except TypeError:
        return f"its parameters are {signature_text(signature.parameters.values())}; expected {expected}"
    return None


def signature_text(parameters: Iterable[inspect.Parameter]) -> str:
    """Format parameters without their types: ``(step, *, block=False)``."""
    return str(inspect.Signature([each.replace(annotation=each.empty) for each in parameters]))


def float_to_json(value: float) -> float | str:
    """A float as a JSON number; NaN and infinities, which JSON lacks, as text."""
    return value if math.isfinite(value) else repr(value)


def members(value: Any, *names: str) -> dict[str, Any]:
    """Convert the attributes ``names`` of a value, or all fields of a dataclass, to JSON members in that order.

    If the value is None, so is each member. Errors and paths become text, a set a sorted list.
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
    """Convert a value to JSON types; a dataclass by ``members``."""
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


def list_fault(values: object) -> str | None:
    """Describe why values are no list of names; None if they are. An iterator is none: reading it would empty it."""
    are_texts = isinstance(values, Collection) and all(isinstance(x, str) for x in values)
    if are_texts and not isinstance(values, str):
        return None
    shown = values if isinstance(values, str) and values else "model"
    return f"must be a list of names, such as [{shown!r}], not {values!r:.80}"
