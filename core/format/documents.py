"""The JSON documents that tierfall writes: their envelope, and typed access to their members.

A document starts with ``format: 1`` and ``requires: []`` and ends in a ``digest`` member, the SHA-256 of every byte
before that member, which detects any flipped, missing or added bit. Readers ignore unknown members; a manifest is
copied with them. An unknown format or requirement is refused with a message about what to do.
``JsonFields`` checks the type and range of each member.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, IntegrityError, NotSupportedError

T = TypeVar("T")
logger = logging.getLogger("tierfall")

FORMAT = 1
MAX_DOCUMENT_BYTES = 256 << 20
_TAIL = ',"digest":"sha256:'
_TAIL_BYTES = len(_TAIL) + 64 + len('"}\n')


class Spliced(bytes):
    """Serialised JSON, inserted into a document unchanged."""


def sha256(data: bytes | memoryview) -> str:
    """Return ``sha256:`` and the digest in hexadecimal."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def dumps(value: object) -> bytes:
    """Serialise compactly; ValueError for a float that is not finite."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def seal(members: Mapping[str, object]) -> bytes:
    """Serialise members, in their order, inside the envelope."""
    parts = [b'{"format":%d,"requires":[]' % FORMAT]
    for name, value in members.items():
        parts.append(b"," + dumps(name) + b":")
        parts.append(value if isinstance(value, Spliced) else dumps(value))
    body = b"".join(parts)
    return body + _TAIL.encode() + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def open_sealed(data: bytes, *, what: str) -> dict[str, Any]:
    """Verify and parse a document; ``what`` names it in errors.

    Raises IntegrityError if the bytes differ from those that were sealed, NotSupportedError if a newer tierfall wrote
    them.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise IntegrityError(f"{what}: {len(data)} bytes are more than any tierfall document has")
    body, tail = data[:-_TAIL_BYTES], data[-_TAIL_BYTES:]
    if tail != f'{_TAIL}{hashlib.sha256(body).hexdigest()}"}}\n'.encode():
        raise IntegrityError(
            f"{what}: its digest does not match its bytes (damaged, truncated, or not a tierfall document)"
        )
    try:
        document = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{what}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise IntegrityError(f"{what}: not a JSON object")
    if document.get("format") != FORMAT or document.get("requires") != []:
        raise NotSupportedError(
            f"{what}: written in format {document.get('format')!r} requiring {document.get('requires')!r}; this "
            f"tierfall reads format {FORMAT}: install the tierfall that wrote it, or a newer one"
        )
    return document


def read_twice(read: Callable[[], T]) -> T:
    """Return the result of ``read``. It is called once more if it raises IntegrityError, since the transfer may have
    altered what is stored intact."""
    try:
        return read()
    except IntegrityError as error:
        misread = error
    found = read()
    log_misread(misread)
    return found


def log_misread(error: IntegrityError) -> None:
    """Log the ``error`` of a first read whose second read was intact."""
    logger.warning("misread once, intact when read again: %s", error)


def refuse_constant(text: str) -> float:
    """For ``json.loads(parse_constant=...)``: NaN and infinities are not JSON."""
    raise ValueError(f"{text} is not allowed here")


class JsonFields:
    """Typed access to a parsed object; ``what`` names it in errors. Raises IntegrityError for a member that is missing
    or of another type."""

    def __init__(self, members: Mapping[str, Any], what: str) -> None:
        self._members = members
        self._what = what

    def has(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str, kind: Any) -> Any:
        value = self._members.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise IntegrityError(f"{self._what}: member {name!r} is missing or of a wrong type")
        return value

    def number(self, name: str, low: int, high: int) -> int:
        value: int = self.get(name, int)
        if not low <= value <= high:
            raise IntegrityError(f"{self._what}: {name!r} is {value}, not within {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """A bool; false if the member is missing."""
        value = self._members.get(name, False)
        if not isinstance(value, bool):
            raise IntegrityError(f"{self._what}: member {name!r} is neither true nor false")
        return value

    def flag_or_none(self, name: str) -> bool | None:
        """A bool, or None where the member is null or missing."""
        return None if self._members.get(name) is None else self.flag(name)

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        values = self.get(name, list)
        if not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
            raise IntegrityError(f"{self._what}: {name!r} holds an entry of a wrong type")
        return list(values)

    def parse(self, name: str, parse: Callable[[Any], T], value: Any) -> T:
        try:
            return parse(value)
        except (ValueError, OverflowError) as error:
            raise IntegrityError(f"{self._what}: {name!r}: {error}") from error

    def real(self, name: str) -> float:
        value: float = self.parse(name, float, self.get(name, int | float))
        if not math.isfinite(value):
            raise IntegrityError(f"{self._what}: {name!r} is {value}, not a finite number")
        return value

    def name(self, name: str) -> str:
        """Text that becomes part of a key, restricted so that it cannot lead out of a folder."""
        value: str = self.get(name, str)
        try:
            return keys.check_name(value, what=f"{self._what}: {name!r}")
        except ConfigError as error:
            raise IntegrityError(str(error)) from error

    def nullable(self, name: str, read: Callable[[JsonFields], T]) -> T | None:
        """An object, parsed by ``read``, or null; missing is an error."""
        if name not in self._members:
            raise IntegrityError(f"{self._what}: member {name!r} is missing")
        if self._members[name] is None:
            return None
        return read(JsonFields(self.get(name, dict), f"{self._what}: {name}"))
