"""Keys: the names that an object may have, checked in every call and again in what a listing returns.

A key is one or more name components joined by '/', relative, without '..'. Names of unfinished objects begin with a
prefix, or end in a suffix, that no component of a key has, so the two never collide. This module knows no medium.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import unicodedata

from tierfall.core.types.errors import KeyInvalidError

COMPONENT_BYTES_MAX = 255
KEY_BYTES_MAX = 1024
RESERVED_PREFIX = ".tierfall-"

_UNFINISHED = re.compile(
    r"(\.tierfall-[0-9]+-[0-9a-f]{16}\.part|\..+\.tierfall-[0-9]+-[0-9a-f]{16})\Z"
)


def check_key(key: str) -> str:
    """Return a key unchanged, or raise KeyInvalidError with the reason."""
    reason = _key_fault(key)
    if reason:
        raise KeyInvalidError(
            f"key {key!r}: {reason}; expected relative parts joined by '/', such as 'run/step/commit.json'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return a prefix (empty, or a key and '/') unchanged, or raise KeyInvalidError with the reason."""
    if prefix == "":
        return prefix
    if not isinstance(prefix, str) or not prefix.endswith("/"):
        raise KeyInvalidError(f"prefix {prefix!r}: expected '' or a prefix that ends in '/'")
    check_key(prefix[:-1])
    return prefix


def is_key(key: str) -> bool:
    """Whether a name in a listing is a valid key."""
    return _key_fault(key) is None


def is_component(name: str) -> bool:
    """Whether a name is valid as one component of a key."""
    return _component_fault(name) is None


def unfinished_name(leaf: str = "", *, exclusive: bool = False) -> str:
    """Return a new name for an unpublished object of this node, whose key ends in ``leaf``; the process id in it is for
    people. ``exclusive``: the object is linked to its key if that is free. GlusterFS stores ``.NAME.suffix`` on the
    server of NAME, and only there does the second of two links at the same moment fail."""
    name = f"{RESERVED_PREFIX}{os.getpid()}-{_mark(leaf)}{secrets.token_hex(4)}"
    whole = f".{leaf}{name}"
    return whole if exclusive and len(whole.encode()) <= COMPONENT_BYTES_MAX else f"{name}.part"


def is_unfinished_of(name: str, leaf: str) -> bool:
    """Whether ``unfinished_name`` can have returned this name for that leaf, on this node."""
    return is_unfinished(name) and name.rpartition("-")[2].startswith(_mark(leaf))


def _mark(leaf: str) -> str:
    return hashlib.sha256(f"{platform.node()}/{leaf}".encode()).hexdigest()[:8]


def is_unfinished(name: str) -> bool:
    """Whether ``unfinished_name`` can have returned this name."""
    return _UNFINISHED.match(name) is not None


def _key_fault(key: str) -> str | None:
    if not isinstance(key, str) or key == "":
        return "it is empty or no text"
    for part in key.split("/"):
        fault = _component_fault(part)
        if fault:
            return fault
    if len(key.encode()) > KEY_BYTES_MAX:
        return f"it is longer than {KEY_BYTES_MAX} bytes"
    return None


def _component_fault(part: str) -> str | None:
    if part == "":
        return "a part is empty (a leading, trailing or doubled '/')"
    if part in (".", ".."):
        return f"the part {part!r} leads out of its folder"
    if "/" in part or "\\" in part:
        return "a part contains a separator"
    if not (part.isascii() and part.isprintable()) and any(
        unicodedata.category(letter) in ("Cc", "Cs") for letter in part
    ):
        return "a part contains a control character or is no valid Unicode"
    if part.lower().startswith(RESERVED_PREFIX) or is_unfinished(part):
        return f"a part has {RESERVED_PREFIX!r} in it, which is kept for unfinished objects"
    if len(part.encode()) > COMPONENT_BYTES_MAX:
        return f"a part is longer than {COMPONENT_BYTES_MAX} bytes"
    return None
