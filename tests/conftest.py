"""What tests of whole runs share: a small state, a configuration whose folders are the test's own, a run to damage."""

from __future__ import annotations

import gc
import importlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from _pytest.logging import LogCaptureHandler

import tierfall
from tests.core.ranks.threads import network
from tests.media import Medium
from tests.object_store import SeaweedFS
from tests.steps import state_of
from tierfall.backends.wrappers import RetryPolicy
from tierfall.core.ranks.ranks import Ranks
from tierfall.core.runtime.messages import wait_for_messages

if TYPE_CHECKING:
    from tests.memory_store import MemoryStore
    from tests.shelf import Shelf

SHARED = Path("/dev/shm")
FIRST = (
    "tests/test_object_tier.py",
    "tests/simulation",
    "tests/test_benchmarks.py",
    "tests/test_benchmarks_peers.py",
    "tests/distributed",
    "tests/policies",
)
"""The longest: what ends a run of several workers is then short."""


# Tests run beside each other: more threads of torch would wait for each other in loops, on cores that others need.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_collection(session: pytest.Session) -> None:
    """Each worker of xdist first imports the test modules, in an order of its own: what one has compiled the others
    load. All in one order, each would compile nearly every module."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    root, named = session.config.rootpath, [Path(arg.split("::")[0]) for arg in session.config.args]
    paths = [
        path
        for each in named
        for path in ([each] if each.is_file() else sorted(each.rglob("test_*.py")))
    ]
    names = [".".join(path.resolve().relative_to(root).with_suffix("").parts) for path in paths]
    first = (
        int(worker.removeprefix("gw")) * len(names) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    )
    for name in names[first:] + names[:first]:
        with suppress(Exception, pytest.skip.Exception):  # the collection reports it
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """The garbage collector does not walk what is there until the end: all modules and all tests."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        firsts = (n for n, path in enumerate(FIRST) if item.nodeid.startswith(path))
        return next(firsts, len(FIRST))

    items.sort(key=place)


# A suite that was started in the background (nohup, a CI's &) may ignore Ctrl-C, which tests send to themselves and to
# what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class LogOfAllThreads(pytest.LogCaptureFixture):
    """``caplog`` with what tierfall's threads have logged so far, which another thread handles."""

    @property
    def handler(self) -> LogCaptureHandler:
        wait_for_messages()
        return super().handler


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    found = LogOfAllThreads(request.node, _ispytest=True)
    yield found
    found._finalize()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder for the host tier, in memory where there is such, removed afterwards."""
    place = SHARED if SHARED.is_dir() else tmp_path
    folder = Path(tempfile.mkdtemp(prefix="tierfall-test-", dir=place))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """An object store in this process whose requests a test refuses."""
    from tests.memory_store import MemoryStore

    return MemoryStore(monkeypatch)


@pytest.fixture
def shelf() -> Iterator[Shelf]:
    """The objects of the tier ``shelf://a``."""
    from tests.shelf import new_shelf  # registers the protocol, for the rest of this process

    yield from new_shelf("a")


@pytest.fixture
def make_config(tmp_path: Path, memory: Path) -> Callable[..., dict[str, Any]]:
    """``make_config(disk={...}, slow={...}, host={...}, max_wait="1s")``: a chain of host memory and these folders.

    A keyword that is a dict is a folder of that name below tmp_path (``host``: memory) with these settings; anything
    else is a setting of the run. Without any folder there is one, ``disk``.
    """
    return partial(_config_in, tmp_path, memory)


def _config_in(root: Path, memory: Path, **words: Any) -> dict[str, Any]:
    tiers = {name: value for name, value in words.items() if isinstance(value, dict)}
    host = {"folder": str(memory), "capacity": "4MiB", **tiers.pop("host", {})}
    folders = tiers or {"disk": {}}
    return {
        "run": "run",
        "chunk": "64KiB",
        "max_wait": "30s",
        "tiers": [
            {"name": "host", "kind": "host", **host},
            *(
                {"name": name, "kind": "file", "path": str(root / name), **settings}
                for name, settings in folders.items()
            ),
        ],
        **{name: value for name, value in words.items() if not isinstance(value, dict)},
    }


@pytest.fixture
def make_state() -> Callable[..., dict[str, Any]]:
    """``make_state(seed)``: a model, its optimizer after one step, and a plain value: about 100 KiB."""

    def make(seed: int = 0) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)
        )
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 32)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model, "optimizer": optimizer, "extra": {"epoch": seed}}

    return make


@pytest.fixture
def state(make_state: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_state(0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once: what is waited for here is never the passing of time."""
    monkeypatch.setattr("tierfall.core.runtime.retries.FIRST_S", 0.01)
    monkeypatch.setattr("tierfall.core.runtime.retries.LONGEST_S", 0.05)
    at_once = partial(RetryPolicy, sleep=lambda s: None)
    monkeypatch.setattr("tierfall.setup.tiers.RetryPolicy", at_once)


@pytest.fixture(autouse=True)
def impatient_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are threads see each other's files at once, or never."""
    monkeypatch.setattr("tierfall.setup.start.PATIENCE_S", dict.fromkeys((True, None, False), 0.1))


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    """Two ranks, each on a node of its own."""
    with network(["a", "b"]) as both:
        yield both


@pytest.fixture
def slow_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Medium:
    """What the steps of a tier named ``slow`` lie on."""
    return Medium(tmp_path / "slow" / "run" / "step-", monkeypatch)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder that is made by the export; whatever was unfinished must have gone."""
    yield tmp_path / "out" / "deep"
    left = [str(path) for path in tmp_path.rglob("*") if path.name.endswith(".unfinished")]
    left += [str(path) for path in tmp_path.rglob("*.image")]
    assert left == []


@pytest.fixture(scope="session")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tier with two committed steps, for copies."""
    root = tmp_path_factory.mktemp("saved")
    with tierfall.open(_config_in(root, root / "memory")) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        ckpt.save(2, state_of(2), block=True)
    return root / "disk"


@pytest.fixture
def run_folder(saved_run: Path, tmp_path: Path) -> Path:
    """Two committed steps; the tests damage the newer one."""
    shutil.copytree(saved_run, tmp_path / "disk")
    return tmp_path / "disk" / "run"


@pytest.fixture
def newest(run_folder: Path) -> Path:
    return run_folder / "step-00000002-a0001"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running S3 server, one for the session; ``make_bucket`` gives a test its own place."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def bucket(s3_server: SeaweedFS) -> Iterator[str]:
    """A fresh bucket on the server."""
    name = f"bucket-{secrets.token_hex(6)}"
    s3_server.make_bucket(name)
    yield name
    s3_server.remove_bucket(name)
