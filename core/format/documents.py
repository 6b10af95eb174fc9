"""The envelope of all JSON documents that tierfall writes.

A document starts with ``format: 1`` and ``requires: []`` and ends in a ``digest`` member, the SHA-256 of every byte
before that member, which detects any flipped, missing or added bit. Readers ignore unknown members; readers that
rewrite a document keep them. An unknown format or requirement is refused with a message about what to do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from tierfall.core.types.errors import IntegrityError, NotSupportedError

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


def refuse_constant(text: str) -> float:
    """For ``json.loads(parse_constant=...)``: NaN and infinities are not JSON."""
    raise ValueError(f"{text} is not allowed here")


def float_from_json(value: float | str) -> float:
    return float(value)
