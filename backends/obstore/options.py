"""Opening obstore's stores by an address and by the option names of fsspec, gcsfs and adlfs.

``gs://bucket/prefix`` (``gcs://``) has the options project, which is only needed to create buckets and is ignored;
token (``anon``, ``google_default``, the path of a JSON key file, such a key as a mapping or JSON text, an access
token), endpoint_url and timeout. ``az://container/prefix`` (``abfs://``, ``abfss://``, also as
``container@account.dfs.core.windows.net``) has account_name, account_key, sas_token, connection_string, credential (a
shared access signature), client_id, client_secret, tenant_id, anon, account_host, connection_timeout and read_timeout.
obstore looks for missing credentials in the environment and at metadata services. An unknown option is an error.

``memory://`` has no options; it is for tests. ``s3://`` has its own client. ``file://`` is not served: obstore's
deletes and lookups fail on a folder of the key's name, and it rejects names near 255 bytes; folders have their own
backend.

Not tested against Google Cloud Storage or Azure themselves: tests check the stores that are built, and run obstore
against a substitute on loopback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, GCSStore, MemoryStore

from tierfall.backends.object.client import Deletions, NotServedError
from tierfall.backends.obstore.client import ObstoreClient, building, translated
from tierfall.backends.toolkit.keys import place_below
from tierfall.core.types.errors import BackendError

if TYPE_CHECKING:
    # These names exist for type checkers only.
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

_GOOGLE = ("gs", "gcs")
_AZURE = ("az", "abfs", "abfss")

# Wrappers retry; only a part of obstore's own writer must be retried by obstore.
NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(minutes=1)}
RETRIES: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(minutes=3)}

_PATH_STARTS = ("/", "~", "./", "../")
_CONNECTION_WORDS = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}


def open_client(url: str, options: Mapping[str, Any] | None = None) -> ObstoreClient:
    """Make the client; makes no request yet.

    Raises NotServedError for a protocol or an option that obstore does not have, and BackendError for an invalid value.
    """
    # Literal, as in fsspec: '#' and '%' are characters of a key.
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    given = dict(options or {})
    if scheme in _GOOGLE:
        return _open_google(bucket, path, given)
    if scheme in _AZURE:
        return _open_azure(bucket, path, given)
    if scheme != "memory":
        raise NotServedError(f"{scheme}:// is not known to obstore")
    _check_all_used(given, "memory://")
    store = MemoryStore()
    return ObstoreClient(place="memory://", prefix="", durable=False, store=store, streams=store)


def _open_google(bucket: str, path: str, options: dict[str, Any]) -> ObstoreClient:
    """Make a client for a bucket; makes no request yet."""
    place, prefix = place_below(f"gs://{bucket}", path)
    what = f"open {place}"
    options.pop("project", None)
    config = _google_token(options.pop("token", None), what)
    endpoint = options.pop("endpoint_url", None)
    if endpoint is not None:
        config["base_url"] = str(endpoint).rstrip("/")
    client = _timeouts(options, {"timeout": "timeout"}, what)
    client["allow_http"] = str(endpoint or "").startswith("http://")
    _check_all_used(options, what)
    with building(what, config):
        stores = [
            GCSStore(bucket, config=config, client_options=client, retry_config=retries)  # type: ignore[arg-type]
            for retries in (NO_RETRIES, RETRIES)
        ]
    return _client(place, prefix, stores)


def _open_azure(container: str, path: str, options: dict[str, Any]) -> ObstoreClient:
    """Make a client for a container; makes no request yet."""
    place, prefix = place_below(f"az://{container}", path)
    what = f"open {place}"
    container, _, host = container.partition("@")
    config = _connection(options.pop("connection_string", None), what)
    if host:
        config["account_name"] = host.partition(".")[0]
    config |= _azure_keys(options, what)
    account_host = options.pop("account_host", None)
    if account_host is not None:
        config["endpoint"] = f"https://{account_host}"
    client = _timeouts(
        options, {"connection_timeout": "connect_timeout", "read_timeout": "timeout"}, what
    )
    client["allow_http"] = config.get("endpoint", "").startswith("http://")
    _check_all_used(options, what)
    with building(what, config):
        stores = [
            AzureStore(container, config=config, client_options=client, retry_config=retries)  # type: ignore[arg-type]
            for retries in (NO_RETRIES, RETRIES)
        ]
    return _client(place, prefix, stores, deletions=AzureDeletions(stores[0]))


class AzureDeletions:
    """Azure's batch deletion by obstore; see ``Deletions``. For Google Cloud Storage, obstore has only concurrent
    single requests."""

    keys_max = 256

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        with translated(what):
            obstore.delete(self._store, keys)
        return ()


def _check_all_used(left: Collection[str], what: str) -> None:
    """Raise NotServedError with the names of the options that are left."""
    if left:
        names = ", ".join(sorted(map(str, left)))
        raise NotServedError(f"{what}: unknown options {names}: obstore has nothing for them")


def _client(
    place: str,
    prefix: str,
    stores: Sequence[ObjectStore],
    *,
    deletions: Deletions | None = None,
) -> ObstoreClient:
    store, streams = stores
    return ObstoreClient(
        place=place,
        prefix=prefix,
        durable=True,
        store=store,
        streams=streams,
        deletions=deletions,
    )


def _google_token(token: Any, what: str) -> dict[str, Any]:
    if token is None or token == "google_default":
        return {}
    if token == "anon":
        return {"skip_signature": True}
    if isinstance(token, str) and token.lstrip().startswith("{"):
        token = _key_in(token, what)
    if isinstance(token, Mapping):
        if token.get("type") == "service_account":
            return {"service_account_key": json.dumps(dict(token))}
        raise NotServedError(
            f"{what}: obstore accepts a service account key as a token, no other key"
        )
    if not isinstance(token, str) or token in ("cloud", "browser", "cache"):
        raise NotServedError(f"{what}: obstore does not support this kind of token")
    if token.startswith(_PATH_STARTS) or token.endswith(".json") or os.path.exists(token):
        return {_key_kind(token, what): token}
    return {"bearer_token": token}


def _key_in(text: str, what: str) -> Mapping[str, Any]:
    """Parse a JSON key that was given as text."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BackendError(f"{what}: the token begins like a JSON key, and is none")
    return document


def _key_kind(path: str, what: str) -> str:
    """Return obstore's option for a JSON key file. The path is never shown, since a secret may have been given in its
    place."""
    kind = None
    try:
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        kind = type(error).__name__
    if kind is not None:
        raise BackendError(
            f"{what}: the token seems to be the path of a JSON key file, but there is no such file: {kind}; expected "
            "such a path, a key as JSON text or as a mapping, 'anon', 'google_default', or an access token"
        )
    is_service = isinstance(document, dict) and document.get("type") == "service_account"
    return "service_account" if is_service else "application_credentials"


def _connection(text: Any, what: str) -> dict[str, Any]:
    """Parse a connection string: ``Name=value`` joined by ';'."""
    pairs = [pair.partition("=") for pair in str(text or "").split(";") if pair.strip()]
    if any(not sign for _, sign, _ in pairs):
        raise BackendError(f"{what}: connection_string must be Name=value joined by ';'")
    given = {name.strip(): value for name, _, value in pairs}
    config = {name: given.pop(word) for word, name in _CONNECTION_WORDS.items() if word in given}
    protocol = given.pop("DefaultEndpointsProtocol", "https")
    suffix = given.pop("EndpointSuffix", None)
    if suffix and "endpoint" not in config:
        config["endpoint"] = f"{protocol}://{config.get('account_name', '')}.blob.{suffix}"
    for other in ("QueueEndpoint", "TableEndpoint", "FileEndpoint"):
        given.pop(other, None)
    _check_all_used([f"connection_string: {name}" for name in given], what)
    return config


def _azure_keys(options: dict[str, Any], what: str) -> dict[str, Any]:
    keys = {
        "account_name": options.pop("account_name", None),
        "account_key": options.pop("account_key", None),
        "sas_key": options.pop("sas_token", None),
        "client_id": options.pop("client_id", None),
        "client_secret": options.pop("client_secret", None),
        "tenant_id": options.pop("tenant_id", None),
    }
    credential = options.pop("credential", None)
    if credential is not None:
        if not isinstance(credential, str) or "sig=" not in credential:
            raise NotServedError(
                f"{what}: obstore accepts only a shared access signature as credential"
            )
        keys["sas_key"] = credential
    found = {name: value for name, value in keys.items() if value is not None}
    # As in adlfs, 'anon' has an effect only without credentials.
    if options.pop("anon", False) and found.keys() <= {"account_name"}:
        found["skip_signature"] = True
    return found


def _timeouts(options: dict[str, Any], names: Mapping[str, str], what: str) -> ClientConfig:
    config: ClientConfig = {}
    for name, obstore_name in names.items():
        value = options.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, int | float) or value <= 0:
            raise BackendError(f"{what}: {name} is a number of seconds above 0")
        config[obstore_name] = timedelta(seconds=value)  # type: ignore[literal-required]
    return config
