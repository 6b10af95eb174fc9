"""From an address and fsspec's option names to obstore's stores.

``gs://`` and ``az://`` are in ``gcs_azure``. ``memory://`` takes no options; it is for tests. ``s3://`` has a client of
this package's own. ``file://`` is not served: obstore's deletes and lookups fail on a folder of the key's name, and it
takes no name near 255 bytes; folders have a backend of their own. An option that is not known is an error, never
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from obstore.store import MemoryStore

from tierfall.backends.object.client import NotServedError
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.obstore.gcs_azure import (
    AZURE,
    GOOGLE,
    check_taken,
    open_azure,
    open_google,
)


def open_client(url: str, options: Mapping[str, Any] | None = None) -> ObstoreClient:
    """Make the client; nothing is asked of the store yet.

    Raises NotServedError for a protocol or an option's name that obstore has none for, and BackendError naming what
    else is wrong.
    """
    # Taken literally, as fsspec does: '#' and '%' are letters of a key.
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    given = dict(options or {})
    if scheme in GOOGLE:
        return open_google(bucket, path, given)
    if scheme in AZURE:
        return open_azure(bucket, path, given)
    if scheme != "memory":
        raise NotServedError(f"{scheme}:// is not known to obstore")
    check_taken(given, "memory://")
    store = MemoryStore()
    return ObstoreClient(place="memory://", prefix="", durable=False, store=store, streams=store)
