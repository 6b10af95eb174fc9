"""Storage services that are killed, filled by one node and read by another: what holds on a disk holds there.

``make test-places`` runs them. Two nodes are two folders of host memory, and two mounts of the file system.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

import tierfall
from tests.distributed.job import Job
from tests.place_program import MIB, is_state, sent_bytes, state_of
from tests.places import PLACES, Gluster, Place
from tests.steps import blank, save_steps, step_in, wait_until
from tierfall.backends.conformance import CHECKS, check_promise
from tierfall.backends.conformance.kit import get, in_threads, put
from tierfall.backends.wrappers import Retrying, RetryPolicy
from tierfall.core.types.backend import Backend, Publish
from tierfall.core.types.errors import KeyExistsError

pytestmark = pytest.mark.places
PATIENCE_S = 120.0
PROGRAM = Path(__file__).with_name("place_program.py")
Make = Callable[..., dict[str, Any]]
P = TypeVar("P", bound=Place)


def opened(kind: type[P], tmp_path_factory: pytest.TempPathFactory) -> Iterator[P]:
    with closing(kind(tmp_path_factory.mktemp("place"))) as place:
        place.start()
        yield place


@pytest.fixture(params=PLACES, scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    yield from opened(PLACES[request.param], tmp_path_factory)


@pytest.fixture(scope="module")
def pfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gluster]:
    yield from opened(Gluster, tmp_path_factory)


@pytest.fixture
def config(place: Place, memory: Path) -> Make:
    """``config(node, {...})``: a node's host memory and the place, with these settings of the tier."""
    below = secrets.token_hex(6)

    def make(node: int = 0, more: dict[str, Any] | None = None, **words: Any) -> dict[str, Any]:
        host = {"name": "host", "kind": "host", "folder": str(memory / str(node))}
        tier = {"name": "place", **place.tier(below, node), **(more or {})}
        return {"run": "run", "chunk": "1MiB", "max_wait": "60s", "tiers": [host, tier], **words}

    return make


def on_the_other_node(config: Make, step: int | None = None) -> int:
    """Load a step there, and return which: all of its bits are what was saved."""
    loaded = tierfall.load(config(1), step=step)
    found: int = loaded["extra"]["step"]
    assert is_state(loaded, found), f"step {found} is not what was saved"
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_a_parallel_file_system_keeps_each_promise_of_a_backend(name: str, pfs: Gluster) -> None:
    """Retried as a tier's is: GlusterFS may say ESTALE of a folder that is just removed. A second backend is on the
    other node. Object stores: tests/backends/test_object_store_conformance.py."""
    below = secrets.token_hex(6)

    def on(node: int) -> Backend:
        return Retrying(pfs.backend(below, node), RetryPolicy())

    check_promise(name, lambda: on(0), reopen=lambda backend: on(1))


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_a_chain_is_saved_and_restored_bit_for_bit(
    config: Make, memory: Path, tmp_path: Path, codec: str
) -> None:
    chain = config(0, {"compress": {"codec": codec}})
    chain["tiers"].insert(1, {"name": "disk", "kind": "file", "path": str(tmp_path / "disk")})
    with tierfall.open(chain) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state_of(step), block=True)
        ckpt.delete(1)
    assert [on_the_other_node(config, step) for step in (2, 3)] == [2, 3]
    for lost in (memory / "0", tmp_path / "disk"):
        shutil.rmtree(lost)
    state = state_of(0)
    with tierfall.open(config(0, {"compress": {"codec": codec}})) as ckpt:
        report = ckpt.restore(state)
        assert report is not None
        assert report.step == 3
        assert is_state(state, 3)
        assert {source.tier for source in report.sources} == {"place"}
        assert [info.step for info in ckpt.checkpoints()] == [2, 3]


def test_a_trainer_that_is_killed_in_mid_flush_loses_nothing(config: Make, tmp_path: Path) -> None:
    job = Job(tmp_path, 1, program=PROGRAM)
    try:
        job.start("doomed", config=config(0, {"bandwidth": "6MB/s"}))
        job.wait_ready()
    finally:
        job.kill()
    assert on_the_other_node(config) == 1, "what was durable; of step 2 nothing counts yet"
    [found] = Job(tmp_path, 1, program=PROGRAM).run("go_on", config=config(), step=3)
    assert found == [2, True], "it was in memory"
    assert [on_the_other_node(config, step) for step in (1, 2, 3)] == [1, 2, 3]


def test_servers_that_die_in_mid_flush_and_come_back_get_every_save(
    config: Make, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="tierfall")
    with tierfall.open(config(0, {"bandwidth": "6MB/s"}, max_wait="5s")) as ckpt:
        first = ckpt.save(1, state_of(1))
        wait_until(lambda: sent_bytes(ckpt) > 2 * MIB, "a part is sent", PATIENCE_S)
        place.kill()
        try:
            assert not first.done()
            second = ckpt.save(2, state_of(2))
            second.captured(PATIENCE_S)
            wait_until(lambda: "still being tried" in caplog.text, "it is said", PATIENCE_S)
        finally:
            place.start()
        wait_until(lambda: first.done() and second.done(), "all is flushed", PATIENCE_S)
        assert (first.outcome, second.outcome) == ("saved", "saved")
        assert "tier place accepts copies again" in caplog.text
        ckpt.save(3, state_of(3), block=True)
    assert [on_the_other_node(config, step) for step in (1, 2, 3)] == [1, 2, 3]


def test_of_two_nodes_that_create_one_key_at_once_one_wins(pfs: Gluster) -> None:
    below = secrets.token_hex(6)
    nodes = [pfs.backend(below, node) for node in Gluster.NODES]
    for number in range(300):

        def create(node: int, key: str = f"run/{number}") -> None:
            put(nodes[node], key, bytes([node]), publish=Publish.IF_ABSENT)

        errors = in_threads(2, create)
        (winner,) = (node for node, error in enumerate(errors) if error is None)
        assert isinstance(errors[1 - winner], KeyExistsError), errors
        assert get(nodes[1 - winner], f"run/{number}") == bytes([winner])
    for backend in nodes:
        backend.close()


@pytest.mark.parametrize("dead", Gluster.BRICKS)
def test_starts_while_one_server_of_two_is_down_lose_nothing(
    dead: int, pfs: Gluster, memory: Path
) -> None:
    """The file system then says of some files that they do not exist. A start may go on without the tier, or raise."""
    host = {"name": "host", "kind": "host", "folder": str(memory)}
    tier = {"name": "place", **pfs.tier(secrets.token_hex(6))}
    config = {"run": "run", "max_wait": "5s", "tiers": [host, tier]}
    steps = range(1, 13)
    save_steps(config, *steps)
    pfs.kill_brick(dead)
    try:
        for _ in range(5):
            shutil.rmtree(memory)
            with suppress(tierfall.errors.TierfallError), tierfall.open(config) as ckpt:
                ckpt.restore(blank())
    finally:
        pfs.start_brick(dead)
        pfs.wait_up()
    assert [step_in(tierfall.load(config, step=step)) for step in steps] == [*steps]


def test_two_nodes_save_into_one_folder_and_each_restores_what_the_other_wrote(
    config: Make, memory: Path, tmp_path: Path
) -> None:
    """A rank on each. Then their memory is lost, and the ranks change places."""
    answers = []
    for step, nodes in ((1, (0, 1)), (2, (1, 0))):
        job = Job(tmp_path, 2, [0, 1], program=PROGRAM)
        try:
            for rank, node in enumerate(nodes):
                job.start_rank(rank, "go_on", config=config(node), step=step)
            answers.append(job.wait(PATIENCE_S))
        finally:
            job.kill()
        for node in nodes:
            shutil.rmtree(memory / str(node))
    assert answers == [[None, None], [[1, True], [1, True]]], job.log(0)
