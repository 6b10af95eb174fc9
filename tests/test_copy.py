"""``tierfall copy``: a checkpoint comes to a tier that does not hold it as a flush would bring it, or not at all."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierfall
from tests.crafted_records import MANIFEST, change_manifest
from tests.object_store import SeaweedFS
from tests.steps import blank, files_below, flip, state_of, step_in
from tierfall.backends.object.backend import ObjectStoreBackend
from tierfall.backends.open import open_backend
from tierfall.backends.posix.backend import PosixBackend, PosixWriter
from tierfall.config import load_config
from tierfall.core.copies.verify import CopyVerifier
from tierfall.core.format.records import Attempt
from tierfall.core.types.errors import (
    FencedError,
    IntegrityError,
    StepError,
    UnreachableError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.ops import sync
from tierfall.ops.sync import CopyResult, copy
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
ONE, TWO = CheckpointId(1, 1), CheckpointId(2, 1)
IMAGE = "rank-00000-of-00001.safetensors"
SELDOM = {"flush": {"every": 1000}}


def step_folder(root: Path, step: int = 1, attempt: int = 1) -> Path:
    return root / "run" / f"step-{step:08d}-a{attempt:04d}"


def store_of(root: Path) -> StoredTier:
    return StoredTier(name=root.name, run="run", backend=PosixBackend(root))


def assert_good(root: Path, id: CheckpointId = ONE) -> None:
    """The copy is whole, alone, and restores bit for bit."""
    store = store_of(root)
    with CopyVerifier() as verifier:
        checked = verifier.check_stored(store, id)
    store.close()
    assert checked.good, checked
    assert checked.foreign == ()
    assert step_in(tierfall.load(step_folder(root, id.step))) == id.step


def run_copy(config: dict[str, Any], id: CheckpointId = ONE, tier: str = "far") -> CopyResult:
    return copy(load_config(config), id, tier)


@pytest.fixture
def make_saved(make_config: MakeConfig) -> Callable[..., dict[str, Any]]:
    """Steps 1 (pinned) and 2 on disk; ``far`` is to get one in a thousand."""

    def make(far: dict[str, Any] | None = None, **words: Any) -> dict[str, Any]:
        config = make_config(disk=words.pop("disk", {}), far={**SELDOM, **(far or {})}, **words)
        with tierfall.open({**config, "interval": None}) as ckpt:
            ckpt.save(1, state_of(1), block=True, tags=["first"])
            ckpt.save(2, state_of(2), block=True)
            ckpt.pin(1)
        return config

    return make


@pytest.fixture
def config(make_saved: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return make_saved()


@pytest.mark.parametrize("file", ["commit.json", IMAGE])
def test_what_is_there_and_damaged_is_left_to_a_repair(
    config: dict[str, Any], tmp_path: Path, file: str
) -> None:
    run_copy(config)
    flip(step_folder(tmp_path / "far") / file, 40)
    before = files_below(tmp_path)
    with pytest.raises(IntegrityError, match="tierfall verify 1@1 --tier far --repair"):
        run_copy(config)
    assert files_below(tmp_path) == before


def test_what_is_damaged_on_all_tiers_is_left_to_the_advice_of_verify(
    config: dict[str, Any], tmp_path: Path
) -> None:
    run_copy(config)
    for tier in ("disk", "far"):
        flip(step_folder(tmp_path / tier) / "commit.json", 40)
    with pytest.raises(IntegrityError, match=r"tierfall verify 1@1$"):
        run_copy(config)


def test_another_checkpoint_by_that_name_is_left_as_it_is(
    make_saved: Callable[..., dict[str, Any]], make_config: MakeConfig, tmp_path: Path
) -> None:
    """An earlier life of the run, by the same name and number."""
    with tierfall.open(make_config(other={})) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    config = make_saved()
    shutil.copytree(step_folder(tmp_path / "other"), step_folder(tmp_path / "far"))
    before = files_below(tmp_path)
    with pytest.raises(StepError, match="holds another checkpoint"):
        run_copy(config)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("by", ["copy", "flush"])
def test_a_manifest_of_a_newer_version_is_copied_as_it_is(
    by: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Commit records have its digest: what this version does not know must not be lost."""
    with tierfall.open({**make_config(disk={}), "interval": None}) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    shutil.rmtree(tmp_path / "memory", ignore_errors=True)
    change_manifest(step_folder(tmp_path / "disk"), later=1)
    config = make_config(disk={}, far={})
    if by == "copy":
        (tmp_path / "far").mkdir()
        run_copy(config)
    else:
        with tierfall.open(config) as ckpt:
            assert ckpt.restore(blank())
            ckpt.drain()
    far = step_folder(tmp_path / "far")
    assert json.loads((far / MANIFEST).read_text())["later"] == 1
    assert step_in(tierfall.load(far)) == 1
    assert_good(tmp_path / "far")


# Who else may be at work -----------------------------------------------------------------------------


def test_a_start_that_comes_meanwhile_on_another_node_fences_the_copy(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = sync.send

    def start_elsewhere(*words: Any, **more: Any) -> Any:
        written = real(*words, **more)
        for root in (tmp_path / "disk", tmp_path / "far"):
            store = store_of(root)
            store.fence.create(
                Attempt(run="run", number=2, id="f" * 32, node="other", pid=7, wall_time_s=1.0)
            )
            store.close()
        return written

    monkeypatch.setattr(sync, "send", start_elsewhere)
    with pytest.raises(FencedError, match="process 7 on other"):
        run_copy(config)
    far = step_folder(tmp_path / "far")
    assert not (far / "commit.json").exists()
    assert (far / IMAGE).exists(), (
        "that start may be writing it: what is left is the next one's to collect"
    )
    tierfall.open(config).close()
    assert not far.exists()


def test_after_a_later_attempt_an_older_checkpoint_is_copied_under_it(
    config: dict[str, Any], tmp_path: Path
) -> None:
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank(), step=1)
        ckpt.pin(2)
        ckpt.save(2, state_of(2), block=True)
    run_copy(config, TWO)
    assert_good(tmp_path / "far", TWO)
    attempts = sorted(path.name for path in (tmp_path / "far/run/attempts").iterdir())
    assert "a0002.json" in attempts
    commit = json.loads((step_folder(tmp_path / "far", 2) / "commit.json").read_text())
    assert commit["attempt"] == 1
    latest = (tmp_path / "far/run/latest").exists()
    assert not latest, "a line that was left behind is not the latest"


def test_what_a_trainer_of_another_node_owes_is_left_to_it(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tierfall.open(make_config(disk={})) as ckpt:
        ckpt.save(1, state_of(1), block=True)
    config = make_config(disk={}, far={"shared": True})
    (tmp_path / "far").mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: "login-node")
    with pytest.raises(StepError, match="may be flushing it: run this on"):
        run_copy(config)
    monkeypatch.undo()
    run_copy(config)
    assert_good(tmp_path / "far")


# What is asked for -----------------------------------------------------------------------------------


def test_a_tier_that_is_not_there_is_not_made(config: dict[str, Any], tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "far")
    with pytest.raises(UnreachableError, match="not there"):
        run_copy(config)
    assert not (tmp_path / "far").exists()


def test_the_parts_that_a_killed_copy_uploaded_go(
    config: dict[str, Any], s3_server: SeaweedFS, bucket: str
) -> None:
    url, options = f"s3://{bucket}/checkpoints", s3_server.options()
    config["tiers"].append(
        {"name": "store", "kind": "object", "url": url, "options": options, **SELDOM}
    )
    killed = open_backend(url, options=options)
    assert isinstance(killed, ObjectStoreBackend)
    for key in ("run/step-00000001-a0001/x", "run/step-00000002-a0001/x"):
        killed.create(key, length=20 << 20).write(0, memoryview(bytes(10 << 20)))
    run_copy(config, tier="store")
    left = [key for key, _ in killed._client.pending(killed._client.prefix, "look")]
    killed.close()
    assert left == ["checkpoints/run/step-00000002-a0001/x"], "of this step alone"


@pytest.mark.parametrize("error", [KeyboardInterrupt, IntegrityError])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_copy_that_an_error_has_ended_is_continued(
    make_saved: Callable[..., dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
    error: type[BaseException],
) -> None:
    """What it has sent is left: unfinished, for the next copy, or for the next start, which deletes it."""
    config = make_saved({"compress": {"codec": codec}}, chunk="1MiB", host={"capacity": "64MiB"})
    with tierfall.open(config) as ckpt:
        ckpt.restore(blank())
        ckpt.save(3, {"w": torch.rand(6 << 20)}, block=True)
    offsets: list[int] = []
    real = PosixWriter._put

    def put(self: PosixWriter, offset: int, data: memoryview) -> None:
        if len(data) >= 1 << 20:
            offsets.append(offset)
        real(self, offset, data)

    def interrupted(done: int, total: int) -> None:
        if done * 2 > total:
            raise error("now")

    monkeypatch.setattr(PosixWriter, "_put", put)
    with pytest.raises(error):
        copy(load_config(config), CheckpointId(3, 2), "far", interrupted)
    assert offsets
    (left,) = step_folder(tmp_path / "far", 3, 2).iterdir()
    assert left.name.startswith(".tierfall-")
    sent = {*offsets}
    offsets.clear()
    run_copy(config, CheckpointId(3, 2))
    assert offsets
    assert sent.isdisjoint(offsets)
    found = tierfall.load(step_folder(tmp_path / "far", 3, 2))
    assert torch.equal(found["w"], tierfall.load(config, step=3)["w"])


@pytest.mark.parametrize("codec", ["none", "planes"])
def test_small_chunks_go_to_an_object_store_in_parts_that_it_takes(
    make_config: MakeConfig, s3_server: SeaweedFS, bucket: str, tmp_path: Path, codec: str
) -> None:
    config = make_config(disk={}, host={"capacity": "100MiB", "on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1, elements=2_000_000), block=True)
    config["tiers"].append(
        {
            "name": "store",
            "kind": "object",
            "url": f"s3://{bucket}/checkpoints",
            "options": s3_server.options(),
            "compress": {"codec": codec},
            **SELDOM,
        }
    )
    done = run_copy(config, tier="store")
    assert set(done.sources) == {"host"}
    (image,) = (Path(config["tiers"][0]["folder"]) / "run").glob("*/*.image")
    image.unlink()
    shutil.rmtree(tmp_path / "disk")
    assert step_in(tierfall.load(config, step=1)) == 1
