"""Signed addresses for S3 requests that obstore has no call for.

Given keys are used here, by AWS Signature Version 4 in the query ("Authenticating Requests: Using Query Parameters",
Amazon S3 API Reference), in microseconds. Where obstore finds the credentials by itself (the environment, a role, a
metadata service) it signs, and no secret is seen here; that takes milliseconds.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit, urlunsplit

import obstore
from obstore.store import S3Store

from tierfall.backends.obstore_errors import translated

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


def sign_by_obstore(config: Mapping[str, Any], method: str, url: str, what: str) -> str:
    """Return the address signed by obstore with the credentials that it finds; it looks for them each time, once.

    obstore signs paths of its store and takes no query. A store whose endpoint is this very address signs it as it
    is; the path that it puts behind goes into ``x-id``, a parameter that S3 ignores.
    """
    endpoint = f"{url}{'&' if urlsplit(url).query else '?'}x-id="
    changes = {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    words = {**config, **changes, "virtual_hosted_style_request": True, "prefix": None}
    with translated(f"{what}: sign"):
        store = S3Store("any", **words)
        return obstore.sign(store, method, "tierfall", _VALID)  # type: ignore[call-overload,no-any-return]
