"""From gcsfs's and adlfs's option names to obstore's stores for Google Cloud Storage and Azure.

``gs://bucket/prefix`` (``gcs://``) takes project, which only the making of buckets needs and nothing here uses; token
(``anon``, ``google_default``, the path of a JSON key file, such a key as a mapping or JSON text, an access token),
endpoint_url and timeout. ``az://container/prefix`` (``abfs://``, ``abfss://``, also as
``container@account.dfs.core.windows.net``) takes account_name, account_key, sas_token, connection_string, credential (a
shared access signature), client_id, client_secret, tenant_id, anon, account_host, connection_timeout and read_timeout.
What is not given obstore looks for in the environment and at metadata services.

Not run against Google Cloud Storage or Azure themselves: tests look at the stores that are built, and let obstore
speak to a stand-in on loopback.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.store import AzureStore, GCSStore

from tierfall.backends.object.client import Deletions, NotServedError
from tierfall.backends.obstore.client import ObstoreClient
from tierfall.backends.obstore.errors import building, translated
from tierfall.backends.toolkit.keys import place_below
from tierfall.core.types.errors import BackendError

if TYPE_CHECKING:
    # Not there at run time.
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

GOOGLE = ("gs", "gcs")
AZURE = ("az", "abfs", "abfss")

# Wrappers retry; only in obstore's own writer nobody but obstore can.
NO_RETRIES: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(minutes=1)}
RETRIES: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(minutes=3)}

_PATH_STARTS = ("/", "~", "./", "../")
_CONNECTION_WORDS = {
    "AccountName": "account_name",
    "AccountKey": "account_key",
    "SharedAccessSignature": "sas_key",
    "BlobEndpoint": "endpoint",
}


def open_google(bucket: str, path: str, options: dict[str, Any]) -> ObstoreClient:
    """Make a client for a bucket; nothing is asked of it yet."""
    place, prefix = place_below(f"gs://{bucket}", path)
    what = f"open {place}"
    options.pop("project", None)
    config = _google_token(options.pop("token", None), what)
    endpoint = options.pop("endpoint_url", None)
    if endpoint is not None:
        config["base_url"] = str(endpoint).rstrip("/")
    client = _timeouts(options, {"timeout": "timeout"}, what)
    client["allow_http"] = str(endpoint or "").startswith("http://")
    check_taken(options, what)
    with building(what, config):
        stores = [
            GCSStore(bucket, config=config, client_options=client, retry_config=retries)  # type: ignore[arg-type]
            for retries in (NO_RETRIES, RETRIES)
        ]
    return _client(place, prefix, stores)


def open_azure(container: str, path: str, options: dict[str, Any]) -> ObstoreClient:
    """Make a client for a container; nothing is asked of it yet."""
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
    check_taken(options, what)
    with building(what, config):
        stores = [
            AzureStore(container, config=config, client_options=client, retry_config=retries)  # type: ignore[arg-type]
            for retries in (NO_RETRIES, RETRIES)
        ]
    return _client(place, prefix, stores, deletions=AzureDeletions(stores[0]))


class AzureDeletions:
    """Azure's batch by obstore's call; see ``Deletions``. Google Cloud Storage has none there, only many at once."""

    keys_max = 256

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def delete_some(self, keys: Sequence[str], what: str) -> Sequence[str]:
        with translated(what):
            obstore.delete(self._store, keys)
        return ()


def check_taken(left: Collection[str], what: str) -> None:
    """Raise NotServedError, naming the options that nobody took."""
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
        raise NotServedError(f"{what}: obstore takes a service account as a token, no other key")
    if not isinstance(token, str) or token in ("cloud", "browser", "cache"):
        raise NotServedError(f"{what}: obstore does not take this kind of token")
    if token.startswith(_PATH_STARTS) or token.endswith(".json") or os.path.exists(token):
        return {_key_kind(token, what): token}
    return {"bearer_token": token}


def _key_in(text: str, what: str) -> Mapping[str, Any]:
    """Read a JSON key that was given as text."""
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise BackendError(f"{what}: the token begins like a JSON key, and is none")
    return document


def _key_kind(path: str, what: str) -> str:
    """Say by which name obstore takes a JSON key file. What should be its path may be a secret: it is never shown."""
    kind = None
    try:
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        kind = type(error).__name__
    if kind is not None:
        raise BackendError(
            f"{what}: the token is taken for the path of a JSON key file, and there is no such file: {kind}; expected "
            "such a path, a key as JSON text or as a mapping, 'anon', 'google_default', or an access token"
        )
    is_service = isinstance(document, dict) and document.get("type") == "service_account"
    return "service_account" if is_service else "application_credentials"


def _connection(text: Any, what: str) -> dict[str, Any]:
    """Read a connection string: ``Name=value`` joined by ';'."""
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
    check_taken([f"connection_string: {name}" for name in given], what)
    return config


def _azure_keys(options: dict[str, Any], what: str) -> dict[str, Any]:
    taken = {
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
                f"{what}: obstore takes a shared access signature as credential only"
            )
        taken["sas_key"] = credential
    found = {name: value for name, value in taken.items() if value is not None}
    # adlfs goes without credentials by 'anon' only where none are given.
    if options.pop("anon", False) and found.keys() <= {"account_name"}:
        found["skip_signature"] = True
    return found


def _timeouts(options: dict[str, Any], names: Mapping[str, str], what: str) -> ClientConfig:
    config: ClientConfig = {}
    for name, obstores in names.items():
        value = options.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, int | float) or value <= 0:
            raise BackendError(f"{what}: {name} is a number of seconds above 0")
        config[obstores] = timedelta(seconds=value)  # type: ignore[literal-required]
    return config
