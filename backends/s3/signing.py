"""Signed addresses for S3 requests that obstore has no call for.

Given keys are used here, by AWS Signature Version 4 in the query ("Authenticating Requests: Using Query Parameters",
Amazon S3 API Reference), in microseconds. Where obstore finds the credentials by itself (the environment, a role, a
metadata service) it signs, and no secret is seen here; that takes milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

# How long an address is good: longer than any one request takes.
_VALID = timedelta(hours=1)

# From method, address, and what the request is for in messages, to the signed address.
Sign = Callable[[str, str, str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Credentials that a user gave; never shown."""

    key: str = field(repr=False)
    secret: str = field(repr=False)
    token: str | None = field(repr=False, default=None)
    region: str


def sign_with(
    keys: Keys, method: str, url: str, *, now: datetime | None = None, valid: timedelta = _VALID
) -> str:
    """Return the address with a signature for this method; the body is not signed."""
    parts = urlsplit(url)
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    scope = [stamp[:8], keys.region, "s3", "aws4_request"]
    query = parse_qsl(parts.query, keep_blank_values=True)
    query += [
        ("X-Amz-Algorithm", "AWS4-HMAC-SHA256"),
        ("X-Amz-Credential", "/".join([keys.key, *scope])),
        ("X-Amz-Date", stamp),
        ("X-Amz-Expires", str(int(valid.total_seconds()))),
        ("X-Amz-SignedHeaders", "host"),
    ]
    if keys.token:
        query.append(("X-Amz-Security-Token", keys.token))
    words = "&".join(
        f"{name}={value}"
        for name, value in sorted(
            (quote(name, safe=""), quote(value, safe="")) for name, value in query
        )
    )
    host = f"host:{parts.netloc}"
    request = "\n".join([method, parts.path, words, host, "", "host", "UNSIGNED-PAYLOAD"])
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, "/".join(scope), digest])
    secret = f"AWS4{keys.secret}".encode()
    for word in scope:
        secret = hmac.digest(secret, word.encode(), "sha256")
    signature = hmac.new(secret, text.encode(), "sha256").hexdigest()
    return urlunsplit(parts._replace(query=f"{words}&X-Amz-Signature={signature}"))
