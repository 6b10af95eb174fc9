"""Several threads hash an image from a device, so that its rate is the bus's; one hashes an image from host memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.core.capture.lazy_help import (
    PATIENCE_S,
    MakeConfig,
    Trainer,
    assert_same,
    lazy_save,
    saved,
    warmed_up,
)
from tests.core.fake_device import FakePlaces, FakeStream
from tierfall.core.capture import copier
from tierfall.core.types.errors import CaptureError
from tierfall.run import saver

CHUNK_S = 0.01
"""Of the digest of the tests, in which the interpreter's lock is free."""


class Digests:
    """Stands for the digest of a chunk; ``fails`` is raised on any thread but the capture's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.fails: BaseException | None = None
        self.threads: set[str] = set()
        self.times: list[float] = []
        """When each digest began and ended."""
        self._digest = copier.chunk_digest
        monkeypatch.setattr(copier, "chunk_digest", self._take)

    def _take(self, chunk: memoryview) -> str:
        name = threading.current_thread().name
        self.threads.add(name)
        self.times.append(time.monotonic())
        time.sleep(self.seconds)
        self.times.append(time.monotonic())
        if self.fails is not None and not name.endswith("-capture"):
            raise self.fails
        return self._digest(chunk)


@pytest.fixture
def digests(monkeypatch: pytest.MonkeyPatch) -> Digests:
    return Digests(monkeypatch)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePlaces]:
    """Every state lies on the fake device."""
    stream = FakeStream()
    made = FakePlaces(stream)
    monkeypatch.setattr(saver, "CaptureDevices", made)
    yield made
    stream.close()


def config_of(make_config: MakeConfig, threads: int | None) -> dict[str, Any]:
    config = make_config(chunk="4KiB")
    return config if threads is None else {**config, "capture": {"threads": threads}}


@pytest.mark.parametrize("threads", [1, 4])
def test_an_image_that_several_threads_hashed_is_the_state(
    make_config: MakeConfig, places: FakePlaces, digests: Digests, tmp_path: Path, threads: int
) -> None:
    trainer = Trainer()
    with tierfall.open(config_of(make_config, threads)) as ckpt:
        warmed_up(ckpt, trainer)
        digests.seconds = 0.001
        for step in range(2, 4):
            before = trainer.now()
            handle = lazy_save(ckpt, trainer, step)
            trainer.step()
            handle.wait(timeout=PATIENCE_S)
            assert_same(saved(tmp_path / "disk", step), before)
    assert len(digests.threads) == threads


@pytest.mark.parametrize("error", [MemoryError("no room"), SystemExit(3)])
def test_what_a_thread_raises_fails_the_save_and_not_the_next(
    make_config: MakeConfig,
    places: FakePlaces,
    digests: Digests,
    tmp_path: Path,
    error: BaseException,
) -> None:
    trainer = Trainer()
    with tierfall.open(config_of(make_config, 2)) as ckpt:
        warmed_up(ckpt, trainer)
        digests.seconds, digests.fails = CHUNK_S, error
        handle = lazy_save(ckpt, trainer, 2)
        with pytest.raises(CaptureError, match=r"no room|SystemExit\(3\)"):
            handle.wait(timeout=PATIENCE_S)
        digests.seconds, digests.fails = 0.0, None
        trainer.step()
        before = trainer.now()
        ckpt.save(3, trainer.state, block=True)
    assert_same(saved(tmp_path / "disk", 3), before)
