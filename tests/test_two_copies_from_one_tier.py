"""Two tiers that copy a checkpoint from a third: neither waits for the other."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tierfall
from tests.steps import state_of, steps_on, wait_until
from tierfall.backends.wrappers import Wrapper, WriterWrapper
from tierfall.core.types.backend import Backend, Traits, Writer
from tierfall.core.types.errors import AccessDeniedError

MakeConfig = Callable[..., dict[str, Any]]
PATIENCE_S = 30.0
ELEMENTS = 300_000  # 1.2 MB in chunks of 64 KiB


def is_image(key: str) -> bool:
    return "/rank-" in key and not key.endswith(".json")


class Watched(Wrapper):
    """A tier's storage, which lets the test hold up or refuse what is written of images."""

    def __init__(self, inner: Backend, traits: dict[str, Any]) -> None:
        super().__init__(inner)
        self._traits = traits
        self.name = Path(inner.place).name
        self.on_write: Callable[[int], None] = lambda offset: None
        self.on_create: Callable[[], None] = lambda: None

    @property
    def traits(self) -> Traits:
        return replace(self._inner.traits, **self._traits)

    def create(self, key: str, **words: Any) -> Writer:
        if is_image(key):
            self.on_create()
        writer = self._inner.create(key, **words)
        return WatchedWriter(writer, self) if is_image(key) else writer


class WatchedWriter(WriterWrapper):
    def __init__(self, inner: Writer, watched: Watched) -> None:
        super().__init__(inner)
        self._watched = watched

    def write(self, offset: int, view: memoryview) -> None:
        self._watched.on_write(offset)
        super().write(offset, view)


class Storage:
    """Every tier's ``Watched``, by name; what it is to do is set before the run is opened."""

    def __init__(self) -> None:
        self.on_write: dict[str, Callable[[int], None]] = {}
        self.on_create: dict[str, Callable[[], None]] = {}
        self.traits: dict[str, dict[str, Any]] = {}
        self.tiers: dict[str, Watched] = {}

    def watch(self, inner: Backend) -> Backend:
        name = Path(inner.place).name
        self.tiers[name] = watched = Watched(inner, self.traits.get(name, {}))
        watched.on_write = self.on_write.get(name, watched.on_write)
        watched.on_create = self.on_create.get(name, watched.on_create)
        return watched


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    found = Storage()
    real = tierfall.setup.tiers.Retrying
    monkeypatch.setattr(
        "tierfall.setup.tiers.Retrying",
        lambda inner, retry, **more: real(found.watch(inner), retry, **more),
    )
    return found


def save_on(config: dict[str, Any], memory: Path) -> None:
    """Save step 1 to all tiers of a configuration, and lose what lies in memory."""
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1, elements=ELEMENTS), block=True)
    shutil.rmtree(memory / "run")


def fill(config: dict[str, Any]) -> None:
    """Open a run whose ``disk`` holds a step, and wait for all other tiers."""
    with tierfall.open(config) as ckpt:
        others = {tier["name"] for tier in config["tiers"]} - {"host", "disk"}
        wait_until(lambda: commits_of(ckpt).keys() == others, "all is copied", PATIENCE_S)
        (info,) = ckpt.checkpoints()
        edges = {f"disk->{name}": info.bytes for name in others}
        assert dict(ckpt.statistics().edge_bytes) == edges


def commits_of(ckpt: tierfall.Checkpointer) -> dict[str, int]:
    return {tier: count for tier, count in ckpt.statistics().commits.items() if count}


def are_right(tmp_path: Path, *tiers: str) -> None:
    for tier in tiers:
        assert steps_on(tmp_path / tier) == [1]


def test_a_tier_that_stalls_holds_up_nobody_and_ends_with_the_right_bytes(
    make_config: MakeConfig, memory: Path, tmp_path: Path, storage: Storage
) -> None:
    """All its workers hang with a chunk in hand that the other tier brings too, whoever of them has read it."""
    save_on(make_config(disk={}), memory)
    stalled, go_on = threading.Event(), threading.Event()

    def hang(offset: int) -> None:
        stalled.set()
        assert go_on.wait(PATIENCE_S)

    def wait_for_the_other(offset: int) -> None:
        assert stalled.wait(PATIENCE_S)

    storage.on_write = {"fast": wait_for_the_other, "slow": hang}
    with tierfall.open(make_config(disk={}, fast={}, slow={})) as ckpt:
        try:
            wait_until(lambda: commits_of(ckpt).get("fast") == 1, "fast has it")
            assert "slow" not in commits_of(ckpt)
        finally:
            go_on.set()
        wait_until(lambda: commits_of(ckpt).get("slow") == 1, "slow has it")
        (info,) = ckpt.checkpoints()
        edges = dict(ckpt.statistics().edge_bytes)
        assert edges == {"disk->fast": info.bytes, "disk->slow": info.bytes}
    are_right(tmp_path, "fast", "slow")


def test_a_tier_whose_copy_dies_takes_nothing_from_the_other(
    make_config: MakeConfig, memory: Path, tmp_path: Path, storage: Storage
) -> None:
    save_on(make_config(disk={}), memory)
    refused, written = threading.Event(), Counter[str]()

    def refuse(offset: int) -> None:
        written["dying"] += 1
        if written["dying"] == 3:
            refused.set()
            raise AccessDeniedError("on purpose")

    def write_meanwhile(offset: int) -> None:
        assert refused.wait(PATIENCE_S)

    storage.on_write = {"other": write_meanwhile, "dying": refuse}
    with tierfall.open(make_config(disk={}, other={}, dying={})) as ckpt:
        wait_until(lambda: commits_of(ckpt).keys() == {"other", "dying"}, "both have it")
        assert ckpt.statistics().flush_failures["dying"] == 1
    are_right(tmp_path, "other", "dying")


def damage(folder: Path) -> None:
    """Flip one bit in the middle of the only image below a folder."""
    (image,) = folder.glob("run/*/rank-*.safetensors")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 1
    image.write_bytes(data)


def test_a_damaged_chunk_comes_from_the_next_source_for_both(
    make_config: MakeConfig, memory: Path, tmp_path: Path, storage: Storage
) -> None:
    save_on(make_config(disk={}, mirror={}), memory)
    damage(tmp_path / "disk")
    with tierfall.open(make_config(disk={}, mirror={}, one={}, two={})) as ckpt:
        wait_until(lambda: commits_of(ckpt).keys() >= {"one", "two"}, "both have it")
        (info,) = ckpt.checkpoints()
        edges = ckpt.statistics().edge_bytes
        for tier in ("one", "two"):
            assert edges[f"mirror->{tier}"] >= 1 << 16
            assert edges.get(f"disk->{tier}", 0) + edges[f"mirror->{tier}"] == info.bytes
    are_right(tmp_path, "one", "two")


def test_a_tier_that_takes_bytes_in_rising_order_gets_them_so(
    make_config: MakeConfig, memory: Path, tmp_path: Path, storage: Storage
) -> None:
    save_on(make_config(disk={}), memory)
    in_the_middle, begun, offsets = threading.Event(), threading.Event(), list[int]()

    def lead(offset: int) -> None:
        if offset > ELEMENTS:
            in_the_middle.set()
            assert begun.wait(PATIENCE_S)

    def follow(offset: int) -> None:
        begun.set()
        offsets.append(offset)

    def wait_for_the_other() -> None:
        assert in_the_middle.wait(PATIENCE_S)

    storage.traits = {"late": {"ordered_writes": True}}
    storage.on_write = {"early": lead, "late": follow}
    storage.on_create = {"late": wait_for_the_other}
    fill(make_config(disk={}, early={}, late={}))
    assert offsets == sorted(offsets)
    are_right(tmp_path, "early", "late")
