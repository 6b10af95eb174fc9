"""Compression from the configuration to a restore: the state comes back, plain tools read the files, and statistics
count it."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zstandard

import tierfall
from tests.cli.cli_kit import run
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.values import CopyState
from tierfall.tiers.image_writer import PackedImageWriter

Make = Callable[..., Any]
CODECS = ["zstd", "planes"]
SUFFIX = {"zstd": ".safetensors.zst", "planes": ".safetensors.tfz"}


def weights(seed: int = 0) -> dict[str, Any]:
    """Weights that compress as real ones do: their exponents take few values."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    return {"model": model.to(torch.bfloat16), "half": torch.randn(70_000) * 0.02, "step": seed}


def packed(codec: str, **more: Any) -> dict[str, Any]:
    return {"compress": {"codec": codec, **more}}


def image_on(folder: Path, step: int = 1) -> Path:
    (found,) = folder.glob(f"run/step-{step:08d}-*/rank-*.safetensors*")
    return found


def alone(config: dict[str, Any], tier: str) -> dict[str, Any]:
    """A start on another machine, which sees one stored tier only."""
    host = {**config["tiers"][0], "folder": config["tiers"][0]["folder"] + "-elsewhere"}
    left = [t for t in config["tiers"] if t["name"] == tier]
    return {**config, "tiers": [host, *left]}


def same(loaded: dict[str, Any], state: dict[str, Any]) -> bool:
    model = state["model"].state_dict()
    return (
        all(torch.equal(loaded["model"][name], model[name]) for name in model)
        and torch.equal(loaded["half"], state["half"])
        and loaded["step"] == state["step"]
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("level", [None, 1, 9])
def test_what_is_packed_comes_back_and_is_counted(
    make_config: Make, tmp_path: Path, codec: str, level: int | None
) -> None:
    config = make_config(
        plain={}, small=packed(codec, **({} if level is None else {"level": level}))
    )
    state = weights()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
        counted = ckpt.statistics().compression
    raw, small = image_on(tmp_path / "plain"), image_on(tmp_path / "small")
    assert small.name.endswith(SUFFIX[codec])
    assert set(counted) == {"small"}
    assert counted["small"].raw_bytes == raw.stat().st_size
    assert counted["small"].ratio == pytest.approx(
        raw.stat().st_size / small.stat().st_size, rel=0.02
    )
    assert counted["small"].ratio > 1.1
    assert counted["small"].bytes_per_s > 1e6
    assert same(tierfall.load(alone(config, "small")), state)


def test_zstd_gives_back_the_very_shard(make_config: Make, tmp_path: Path) -> None:
    with tierfall.open(make_config(plain={}, small=packed("zstd"))) as ckpt:
        ckpt.save(1, weights(), block=True)
    raw, small = image_on(tmp_path / "plain"), image_on(tmp_path / "small")
    reader = zstandard.ZstdDecompressor().stream_reader(small.read_bytes(), read_across_frames=True)
    assert reader.readall() == raw.read_bytes()
    if program := shutil.which("zstd"):
        done = subprocess.run([program, "-dc", str(small)], capture_output=True, check=True)
        assert done.stdout == raw.read_bytes()


@pytest.mark.parametrize("codec", CODECS)
def test_a_path_to_a_packed_shard_a_step_or_a_run_loads(
    make_config: Make, tmp_path: Path, codec: str
) -> None:
    state = weights()
    with tierfall.open(make_config(small=packed(codec))) as ckpt:
        ckpt.save(1, state, block=True)
    shard = image_on(tmp_path / "small")
    for path in (shard, shard.parent, shard.parent.parent, tmp_path / "small"):
        assert same(tierfall.load(path), state)


def test_codecs_may_change_between_starts_and_every_copy_is_read(
    make_config: Make, tmp_path: Path
) -> None:
    states = {}
    for step, codec in enumerate(["none", "zstd", "planes", "none"], start=1):
        states[step] = weights(step)
        with tierfall.open(make_config(disk=packed(codec))) as ckpt:
            ckpt.restore(weights(99)) if step > 1 else None
            ckpt.save(step, states[step], block=True)
    names = [image_on(tmp_path / "disk", step).suffix for step in range(1, 5)]
    assert names == [".safetensors", ".zst", ".tfz", ".safetensors"]
    for step, state in states.items():
        assert same(tierfall.load(tmp_path / "disk", step=step), state)
    with tierfall.open(make_config(disk={})) as ckpt:
        report = ckpt.restore(weights(99), step=2)
    assert report is not None
    assert report.step == 2


@pytest.mark.parametrize(
    ("first", "second"), [("zstd", "none"), ("planes", "zstd"), ("none", "planes")]
)
def test_a_tier_that_was_lost_is_filled_from_one_that_packs_otherwise(
    make_config: Make, tmp_path: Path, first: str, second: str
) -> None:
    config = make_config(one=packed(first), two=packed(second))
    state = weights()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    shutil.rmtree(tmp_path / "two")
    with tierfall.open(config) as ckpt:
        assert ckpt.restore(weights(5)) is not None
        report = ckpt.drain()
        assert report.left == ()
        (info,) = ckpt.checkpoints()
        assert info.tiers["two"] is CopyState.COMMITTED
    shutil.rmtree(tmp_path / "one")
    assert same(tierfall.load(tmp_path / "two"), state)


@pytest.mark.parametrize("codec", CODECS)
def test_a_flipped_bit_in_a_frame_sends_the_restore_to_the_next_tier(
    make_config: Make, tmp_path: Path, codec: str
) -> None:
    config = make_config(small=packed(codec), plain={})
    state = weights()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
    image = image_on(tmp_path / "small")
    data = bytearray(image.read_bytes())
    data[len(data) // 2] ^= 8
    image.write_bytes(data)
    with pytest.raises(RestoreError, match="damaged"):
        tierfall.load(tmp_path / "small")
    into = weights(7)
    with tierfall.open(config) as ckpt:
        report = ckpt.restore(into)
    assert report is not None
    assert {source.tier for source in report.sources} == {"small", "plain"}
    assert "chunk" in report.fallbacks[0].what
    assert same({"model": into["model"].state_dict(), "half": into["half"], "step": 0}, state)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("file", ["image", "record", "tail", "cut"])
def test_verify_finds_damage_in_what_is_packed(
    make_config: Make, tmp_path: Path, codec: str, file: str
) -> None:
    config = make_config(small=packed(codec))
    with tierfall.open(config) as ckpt:
        ckpt.save(1, weights(), block=True)
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    command = ["verify", "--config", str(path), "--json"]
    assert run(command).code == 0
    image = image_on(tmp_path / "small")
    (record,) = image.parent.glob("*.stored.json")
    target = record if file == "record" else image
    data = bytearray(target.read_bytes())
    if file == "cut":
        del data[-100:]
    else:
        data[-3 if file == "tail" else len(data) // 3] ^= 1
    target.write_bytes(data)
    answer = run(command)
    assert answer.code == 1, answer.out
    assert target.name in answer.out


def test_a_record_that_vouches_for_frames_elsewhere_is_refused(
    make_config: Make, tmp_path: Path
) -> None:
    with tierfall.open(make_config(small=packed("zstd"))) as ckpt:
        ckpt.save(1, weights(1), block=True)
        ckpt.save(2, weights(2), block=True)
    one, two = (image_on(tmp_path / "small", step).parent for step in (1, 2))
    (record,) = one.glob("*.stored.json")
    shutil.copy(record, two / record.name)
    with pytest.raises(RestoreError, match="is not the record that the commit record names"):
        tierfall.load(tmp_path / "small", step=2)


def test_a_file_by_its_address_is_a_tier_like_a_folder(make_config: Make, tmp_path: Path) -> None:
    config = make_config(disk={})
    config["tiers"].append(
        {
            "name": "store",
            "kind": "object",
            "url": f"file://{tmp_path}/far",
            **packed("zstd"),
        }
    )
    state = weights()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state, block=True)
        newest = ckpt.statistics().newest
    assert newest["site"] is None, "a folder on this machine outlives no site"  # type: ignore[index]
    assert same(tierfall.load(alone(config, "store")), state)
    assert same(tierfall.load(tmp_path / "far"), state)


def test_a_tier_that_hangs_while_it_is_filled_holds_up_no_restore(
    make_config: Make, tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every thread of the tier that packs is stuck with a buffer in its hand; a restore has buffers of its own."""
    config = make_config(disk={}, slow=packed("zstd"), host={"capacity": "8MiB"})
    state = weights()
    with tierfall.open({**config, "tiers": config["tiers"][:2]}) as ckpt:
        ckpt.save(1, state, block=True)
    shutil.rmtree(memory / "run")
    stuck, go_on = threading.Semaphore(0), threading.Event()
    original = PackedImageWriter.write_chunks

    def put(writer: PackedImageWriter, index: int, start: int, view: memoryview) -> None:
        stuck.release()
        assert go_on.wait(60)
        original(writer, index, start, view)

    monkeypatch.setattr(PackedImageWriter, "write_chunks", put)
    with tierfall.open(config) as ckpt:
        try:
            for _ in range(ckpt._session.coordinator.lanes["slow"]._limits.parallel):
                assert stuck.acquire(timeout=30)
            done = threading.Event()
            into = weights(7)
            restorer = threading.Thread(
                target=lambda: (ckpt.restore(into), done.set()), daemon=True
            )
            restorer.start()
            assert done.wait(30), "the restore waits for the tier that hangs"
        finally:
            go_on.set()
        restorer.join()
        assert torch.equal(into["half"], state["half"])
