"""Names of state entries in the image (``model.layer.0.weight``) and in messages (``state["model"]``).

Names are injective: keys join by ``.``; in a user's own keys ``%``, ``.`` and ``/`` become %25, %2E and %2F; an empty
key is ``%e``, a lone surrogate ``%uD800``, and keys that are not str carry a tag (``%i0`` is the int 0). The keys of a
module's state_dict keep their dots.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from tierfall.core.tensors import value_codec

_UNSAFE = re.compile(r"[%./\ud800-\udfff]")
_UNSAFE_IN_MODULE = re.compile(r"[%/\ud800-\udfff]")
_METADATA = "__metadata__"

# The path of an entry: the parent's trail and the key in it; None is the state itself. Formatted only for messages.
Trail = tuple[Any, object] | None


def component(key: object) -> str:
    """Encode one key of a user's container."""
    if type(key) is str:
        if key.isidentifier() and key != _METADATA:
            return key
        return _escape(key, _UNSAFE)
    if type(key) is bool:
        return f"%b{int(key)}"
    if key is None:
        return "%n"
    if type(key) is int and abs(key) < value_codec.INT_LIMIT:
        return f"%i{key}"
    return "%k" + _UNSAFE.sub(
        _percent, json.dumps(value_codec.encode_atom(key), separators=(",", ":"))
    )


@lru_cache(maxsize=1 << 16)
def module_part(key: str) -> str:
    """Encode a key of a module's state_dict, keeping its dots."""
    if key.isascii() and "%" not in key and "/" not in key and key and key != _METADATA:
        return key
    return _escape(key, _UNSAFE_IN_MODULE)


def join(prefix: str, part_: str) -> str:
    return f"{prefix}.{part_}" if prefix else part_


def is_within(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or below it."""
    return name == prefix or name.startswith(prefix + ".")


def path(trail: Trail) -> str:
    """Format a trail as the Python expression that reaches the entry."""
    keys = []
    while trail is not None:
        trail, key = trail
        if isinstance(key, str):
            keys.append(f"[{json.dumps(key, ensure_ascii=False)}]")
        else:
            keys.append(f"[{_short(key)}]")
    return "state" + "".join(reversed(keys))


def _short(key: object) -> str:
    if type(key) is int and abs(key) >= value_codec.INT_LIMIT:
        return hex(key)[:40]
    return repr(key)[:80]


def _escape(key: str, unsafe: re.Pattern[str]) -> str:
    if key == "":
        return "%e"
    if key == _METADATA:
        return "%5F_metadata__"
    return unsafe.sub(_percent, key)


def _percent(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"%u{code:04X}" if code > 0xFF else f"%{code:02X}"
