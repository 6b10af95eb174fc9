"""Addresses signed by obstore, with the credentials that it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from tierfall.backends.obstore.errors import translated
from tierfall.backends.s3.signing import _VALID


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
