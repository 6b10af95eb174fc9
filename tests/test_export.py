"""``tierfall export``: one complete, verified file that other programs read, or no file."""

from __future__ import annotations

import errno
import os
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

import tierfall
from tests.steps import state_of
from tierfall.backends.posix.backend import PosixBackend
from tierfall.config import load_config
from tierfall.core.copies import images
from tierfall.core.format.catalog import merge
from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.tree import MapNode, ModuleNode, TensorNode
from tierfall.core.tensors import value_codec
from tierfall.core.types.errors import (
    AccessDeniedError,
    BackendError,
    CapacityError,
    ConfigError,
    IntegrityError,
    StorageFullError,
)
from tierfall.core.types.values import CheckpointId
from tierfall.export import output, torch_file
from tierfall.export.export import ExportFormat, ExportOptions, ExportResult, export
from tierfall.export.select import select, tensors_of
from tierfall.ops.reader import RunReader
from tierfall.tiers.stored import StoredTier

MakeConfig = Callable[..., dict[str, Any]]
IMAGE = "rank-00000-of-00001.safetensors"
WHOLE = "run-step-00000001"
TIERS = {
    "raw": {},
    "zstd": {"compress": {"codec": "zstd"}},
    "planes": {"compress": {"codec": "planes"}},
}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 16)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(2)])
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight


def some_state() -> dict[str, Any]:
    """A model with tied weights, its optimizer, and what safetensors does not hold."""
    torch.manual_seed(1)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    hidden = model.layers[1](model.layers[0](model.embedding(torch.arange(8))))
    model.head(hidden).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "big": torch.arange(60_000, dtype=torch.float64),  # several chunks
        "odd": torch.ones(3, dtype=torch.complex128),
        "none": torch.empty(0),
        "extra": {"epoch": 3, "names": ["a", ("b", None)]},
        "array": np.arange(5),
    }


@pytest.fixture
def config(make_config: MakeConfig) -> dict[str, Any]:
    """Step 1 of that state in memory and on three tiers, each with a codec of its own."""
    config = make_config(**TIERS, host={"on_close": "keep"})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, some_state(), block=True)
    return config


def export_from(
    config: dict[str, Any], *tiers: str, watch: Any = None, **wish: Any
) -> ExportResult:
    with RunReader(load_config(config)) as run:
        (known,) = merge(run.list())
        words = {"format": ExportFormat.SAFETENSORS, **wish}
        more = () if watch is None else (watch,)
        return export(known, tiers, run.opener(), ExportOptions(**words), *more)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def step_of(tmp_path: Path, tier: str) -> Path:
    return tmp_path / tier / "run" / "step-00000001-a0001"


# What is written -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["host", *TIERS])
def test_the_whole_state_is_the_image_byte_for_byte(
    config: dict[str, Any], tmp_path: Path, out: Path, tier: str
) -> None:
    done = export_from(config, tier, to=out)
    assert done.path == out / f"{WHOLE}.safetensors"
    assert done.path.read_bytes() == (step_of(tmp_path, "raw") / IMAGE).read_bytes()
    assert set(done.sources) == {tier}
    opened = safetensors.torch.load_file(done.path)
    assert torch.equal(opened["big"], some_state()["big"])
    assert len(opened) == done.tensors


@pytest.mark.parametrize("tier", ["host", *TIERS])
def test_a_model_loads_strictly_into_a_fresh_one_ties_included(
    config: dict[str, Any], out: Path, tier: str
) -> None:
    done = export_from(config, tier, to=out, only=("model",))
    assert done.path == out / "model.safetensors"
    loaded = safetensors.torch.load_file(done.path)
    wanted = some_state()["model"].state_dict()
    assert set(loaded) == set(wanted)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    Tied().load_state_dict(loaded)
    with safetensors.safe_open(done.path, "pt") as file:
        assert file.metadata() == {"format": "pt", "tierfall.checkpoint": "run 1@1"}
    assert done.notes == ()


@pytest.mark.parametrize("tier", ["host", *TIERS])
def test_the_torch_file_is_what_load_returns(config: dict[str, Any], out: Path, tier: str) -> None:
    done = export_from(config, tier, to=out, format=ExportFormat.TORCH)
    assert done.path == out / f"{WHOLE}.pt"
    assert "weights_only=False" in done.notes[0]
    loaded = torch.load(done.path, weights_only=False)
    assert_same(loaded, tierfall.load(config))
    tied = loaded["model"]["embedding.weight"], loaded["model"]["head.weight"]
    assert tied[0].data_ptr() == tied[1].data_ptr()


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


@pytest.mark.parametrize("only", ["model", "optimizer", "extra", "odd", "none", "big"])
def test_parts_of_plain_values_load_by_weights_only(
    config: dict[str, Any], out: Path, only: str
) -> None:
    done = export_from(config, "planes", to=out, format=ExportFormat.TORCH, only=(only,))
    assert done.path == out / f"{only}.pt"
    assert done.notes == ()
    assert_same(torch.load(done.path, weights_only=True), tierfall.load(config)[only])


def test_several_parts_keep_their_names(config: dict[str, Any], out: Path) -> None:
    done = export_from(config, "raw", to=out, only=("model.layers.0", "big"))
    assert done.path == out / f"{WHOLE}.safetensors"
    names = {"model.layers.0.weight", "model.layers.0.bias", "big"}
    assert set(safetensors.torch.load_file(done.path)) == names
    done = export_from(config, "raw", to=out, format=ExportFormat.TORCH, only=("extra", "big"))
    loaded = torch.load(done.path, weights_only=True)
    assert loaded["extra"] == some_state()["extra"]
    assert set(loaded) == {"extra", "big"}


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("model.layers.1", {"weight", "bias"}),
        ("model.layers.1.bias", {"bias"}),
        ("big", {"big"}),
        ("optimizer.state.model.layers.0.bias", None),
    ],
)
def test_a_part_below_a_part(
    config: dict[str, Any], out: Path, only: str, names: set[str] | None
) -> None:
    if names is None:  # an optimizer's state is one thing
        with pytest.raises(ConfigError, match="no part of that name"):
            export_from(config, "raw", to=out, only=(only,))
        return
    done = export_from(config, "raw", to=out, only=(only,))
    assert done.path.name == f"{only}.safetensors"
    assert set(safetensors.torch.load_file(done.path)) == names
    inner = export_from(config, "raw", to=out, format=ExportFormat.TORCH, only=(only,))
    loaded = torch.load(inner.path, weights_only=True)
    assert set(loaded) == names if isinstance(loaded, dict) else torch.is_tensor(loaded)


def test_what_safetensors_does_not_hold_is_reported(config: dict[str, Any], out: Path) -> None:
    done = export_from(config, "raw", to=out, only=("odd", "extra"))
    left, raw = done.notes
    assert "omitted" in left
    assert "only tensors: extra;" in left
    assert "as bytes" in raw
    with safetensors.safe_open(done.path, "pt") as file:
        assert file.metadata()["tierfall.dtypes"] == '{"odd": ["complex128", [3]]}'
        assert torch.equal(
            file.get_tensor("odd").view(torch.complex128), torch.ones(3, dtype=torch.complex128)
        )
    with pytest.raises(ConfigError, match="extra has no tensor"):
        export_from(config, "raw", to=out, only=("extra",))


# What goes wrong -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [ExportFormat.SAFETENSORS, ExportFormat.TORCH])
def test_a_damaged_chunk_is_read_from_the_next_tier_and_reported(
    config: dict[str, Any], tmp_path: Path, out: Path, format: ExportFormat
) -> None:
    good = export_from(config, "host", to=tmp_path / "good", format=format).path.read_bytes()
    flip(step_of(tmp_path, "raw") / IMAGE, -70_000)
    packed = step_of(tmp_path, "zstd") / f"{IMAGE}.zst"
    flip(packed, packed.stat().st_size // 4)
    done = export_from(config, "raw", "zstd", to=out, format=format)
    assert done.path.read_bytes() == good
    assert set(done.sources) == {"raw", "zstd"}
    assert any("on raw" in fallback.what for fallback in done.fallbacks)


@pytest.mark.parametrize("wish", [{}, {"only": ("big",)}, {"format": ExportFormat.TORCH}])
def test_damage_in_every_copy_writes_nothing(
    config: dict[str, Any], tmp_path: Path, out: Path, wish: dict[str, Any]
) -> None:
    flip(step_of(tmp_path, "raw") / IMAGE, -70_000)
    with pytest.raises(IntegrityError, match="damaged in every copy"):
        export_from(config, "raw", to=out, **wish)
    assert not out.parent.exists(), "the folders that were made go too"


def test_a_file_that_is_there_stays_unless_it_is_to_be_replaced(
    config: dict[str, Any], out: Path
) -> None:
    out.mkdir(parents=True)
    target = out / "model.safetensors"
    target.write_text("mine")
    read: list[int] = []
    with pytest.raises(BackendError, match="exists already: --force replaces it"):
        export_from(
            config, "raw", to=out, only=("model",), watch=lambda done, total: read.append(done)
        )
    assert (target.read_text(), read) == ("mine", [])
    done = export_from(config, "raw", to=out, only=("model",), replace=True)
    assert len(safetensors.torch.load_file(done.path)) == 6


def test_a_file_that_appears_meanwhile_stays(config: dict[str, Any], out: Path) -> None:
    target = out / f"{WHOLE}.safetensors"

    def appear(done: int, total: int) -> None:
        target.write_text("mine")

    with pytest.raises(BackendError, match="exists already"):
        export_from(config, "raw", to=out, watch=appear)
    assert target.read_text() == "mine"


def test_a_folder_in_its_place_and_a_file_in_place_of_the_folder_are_refused(
    config: dict[str, Any], out: Path
) -> None:
    (out / f"{WHOLE}.safetensors").mkdir(parents=True)
    with pytest.raises(BackendError, match="is a folder"):
        export_from(config, "raw", to=out, replace=True)
    (out / "file").write_text("mine")
    with pytest.raises(BackendError, match="is no folder"):
        export_from(config, "raw", to=out / "file")
    with pytest.raises(BackendError, match="export to"):
        export_from(config, "raw", to=out / "file" / "below")


@pytest.mark.parametrize("only", [(), ("model",)])
@pytest.mark.parametrize("format", [ExportFormat.SAFETENSORS, ExportFormat.TORCH])
def test_a_full_disk_leaves_nothing(
    config: dict[str, Any],
    out: Path,
    only: tuple[str, ...],
    format: ExportFormat,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.pwrite

    def full(descriptor: int, data: Any, offset: int) -> int:
        if offset > 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    monkeypatch.setattr(output.os, "pwrite", full)
    with pytest.raises(StorageFullError, match="No space left"):
        export_from(config, "raw", to=out, only=only, format=format)
    assert not out.parent.exists()


def test_a_disk_that_is_full_when_torch_writes_leaves_nothing(
    config: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(value: object, file: Any, **words: Any) -> None:
        file.write(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch_file.torch, "save", full)
    with pytest.raises(BackendError, match=r"torch\.save could not write it: .enforce fail"):
        export_from(config, "raw", to=out, format=ExportFormat.TORCH)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("cause", "raised"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "no space"), StorageFullError),
    ],
)
@pytest.mark.parametrize("write", [1, 5])
def test_what_stops_torch_while_it_writes_is_what_is_raised(
    config: dict[str, Any],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    cause: BaseException,
    raised: type[BaseException],
    write: int,
) -> None:
    """torch itself then fails to end its file, and says that alone."""
    real = torch.save

    class Failing:
        def __init__(self, file: Any) -> None:
            self.file, self.count = file, 0
            self.flush = file.flush

        def write(self, data: Any) -> int:
            self.count += 1
            if self.count == write:
                raise cause
            written: int = self.file.write(data)
            return written

    monkeypatch.setattr(
        torch_file.torch, "save", lambda state, file, **words: real(state, Failing(file), **words)
    )
    with pytest.raises(raised):
        export_from(config, "raw", to=out, format=ExportFormat.TORCH)
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("module", "call"), [(output.os.path, "lexists"), (output.shutil, "disk_usage")]
)
def test_a_place_that_may_not_be_looked_at_is_reported(
    config: dict[str, Any], out: Path, module: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with RunReader(load_config(config)) as run:
        (known,) = merge(run.list())
        monkeypatch.setattr(module, call, deny)
        with pytest.raises(AccessDeniedError, match=f"export to {out}.*check owner, mode"):
            export(
                known, ["raw"], run.opener(), ExportOptions(to=out, format=ExportFormat.SAFETENSORS)
            )
    monkeypatch.undo()
    assert not out.parent.exists()


@pytest.mark.parametrize("tier", ["raw", "zstd"])
def test_a_checkpoint_that_is_dropped_meanwhile_is_not_called_damaged(
    config: dict[str, Any], tmp_path: Path, out: Path, tier: str
) -> None:
    def drop(done: int, total: int) -> None:
        store = StoredTier(name=tier, run="run", backend=PosixBackend(tmp_path / tier))
        store.delete(CheckpointId(1, 1), attempt=None)
        store.close()

    with pytest.raises(IntegrityError, match=r"1@1 was deleted while it was read") as caught:
        export_from(config, tier, to=out, watch=drop)
    assert "damaged" not in str(caught.value)


def test_an_image_that_is_missing_beside_its_records_is_damage(
    config: dict[str, Any], tmp_path: Path, out: Path
) -> None:
    (step_of(tmp_path, "raw") / IMAGE).unlink()
    with pytest.raises(IntegrityError, match="damaged in every copy"):
        export_from(config, "raw", to=out)


@pytest.mark.parametrize("format", [ExportFormat.SAFETENSORS, ExportFormat.TORCH])
def test_too_little_room_is_reported_before_anything_is_written(
    config: dict[str, Any], out: Path, format: ExportFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(CapacityError, match=r"it needs .* free are 10 B"):
        export_from(config, "raw", to=out, format=format)
    assert not out.parent.exists()


@pytest.mark.parametrize("format", [ExportFormat.SAFETENSORS, ExportFormat.TORCH])
def test_an_interrupt_leaves_nothing(
    config: dict[str, Any], out: Path, format: ExportFormat
) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_from(config, "zstd", to=out, format=format, watch=interrupt)
    assert not out.parent.exists()


def test_a_folder_that_was_there_stays_after_a_failure(
    config: dict[str, Any], tmp_path: Path, out: Path
) -> None:
    out.parent.mkdir()
    flip(step_of(tmp_path, "raw") / IMAGE, -70_000)
    with pytest.raises(IntegrityError):
        export_from(config, "raw", to=out)
    assert (out.parent.exists(), out.exists()) == (True, False)


@pytest.mark.parametrize(
    ("only", "says"),
    [
        (("modl",), "expected one of model, optimizer, big"),
        (("model.layer",), "no part of that name"),
        (("model", "model.layers"), "is within another"),
        (("big", "big"), "named twice"),
        (("../model",), "cannot name a file"),
        (("",), "no part of that name"),
    ],
)
def test_parts_that_are_not_there_are_refused(
    config: dict[str, Any], out: Path, only: tuple[str, ...], says: str
) -> None:
    for format in (ExportFormat.SAFETENSORS, ExportFormat.TORCH):
        with pytest.raises(ConfigError, match=says):
            export_from(config, "raw", to=out, only=only, format=format)
    assert not out.parent.exists()


class Angle:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_a_registered_type_that_is_not_registered_here_is_exported_as_a_plain_value(
    make_config: MakeConfig, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for registry in ("_BY_TYPE", "_BY_NAME"):
        monkeypatch.setattr(value_codec, registry, {})
    tierfall.register_codec(Angle, "angle", lambda angle: angle.degrees, Angle)
    config = make_config()
    with tierfall.open(config) as ckpt:
        ckpt.save(1, {"angle": Angle(30.0), "w": torch.ones(3)}, block=True)
    done = export_from(config, "disk", to=out, format=ExportFormat.TORCH, only=("angle",))
    assert done.notes, "an object of a class is more than plain values"
    monkeypatch.setattr(value_codec, "_BY_NAME", {})
    again = export_from(config, "disk", to=out / "again", format=ExportFormat.TORCH)
    assert any("values of angle are exported as plain values" in note for note in again.notes)
    assert torch.load(again.path, weights_only=False)["angle"] == 30.0


def test_two_tensors_by_one_name_are_refused() -> None:
    """The keys of a module's state_dict may meet those of a dict in it."""
    inner = MapNode("dict", (("b", TensorNode(1)),))
    module = ModuleNode((("a.b", "a.b", TensorNode(0)), ("a", "a", inner)))
    tensors = tuple(StoredTensor(n, torch.uint8, (1,), i, i + 1) for i, n in enumerate("xy"))
    tree = MapNode("dict", (("m", module),))
    header = ImageHeader(
        what="header", data_start=0, data_bytes=2, tensors=tensors, tree=tree, values=()
    )
    (part,) = select(header, ["m"])
    with pytest.raises(ConfigError, match=r"two tensors would be named 'a\.b'"):
        tensors_of(header, part, full_names=False)


def test_a_folder_that_somebody_uses_meanwhile_stays(config: dict[str, Any], out: Path) -> None:
    def put_something(done: int, total: int) -> None:
        (out / "theirs").write_text("theirs")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_from(config, "raw", to=out, watch=put_something)
    assert [path.name for path in out.iterdir()] == ["theirs"]


def test_without_a_good_commit_record_nothing_is_believed(
    config: dict[str, Any], tmp_path: Path, memory: Path, out: Path
) -> None:
    for tier in TIERS:
        flip(step_of(tmp_path, tier) / "commit.json", 40)
    for arena in memory.rglob("*.arena"):
        arena.unlink()
    with pytest.raises(IntegrityError, match="every commit record"):
        export_from(config, "raw", to=out)


def test_beside_a_living_trainer_what_lies_in_memory_alone_is_exported(
    make_config: MakeConfig, out: Path
) -> None:
    config = make_config(disk={"flush": {"every": 2}})
    with tierfall.open(config) as ckpt:
        ckpt.save(1, state_of(1), block=True)
        done = export_from(config, "host", to=out)
        ckpt.drain()
    assert set(done.sources) == {"host"}
    assert torch.equal(safetensors.torch.load_file(done.path)["w"], state_of(1)["w"])


@pytest.mark.parametrize("only", [(), ("big",)])
def test_memory_that_its_trainer_uses_again_meanwhile_does_not_end_up_in_the_file(
    config: dict[str, Any], memory: Path, out: Path, only: tuple[str, ...], monkeypatch: Any
) -> None:
    """The image in memory is written over right after each chunk of it was checked."""
    good = export_from(config, "raw", to=out / "good", only=only).path.read_bytes()
    (arena,) = memory.rglob("*.arena")
    real = images.chunk_digest

    def use_again(view: Any) -> str:
        digest, start = real(view), arena.read_bytes().find(view)
        if start >= 0:
            with open(arena, "r+b") as file:
                file.seek(start)
                file.write(bytes(len(view)))
        return digest

    monkeypatch.setattr(images, "chunk_digest", use_again)
    done = export_from(config, "host", "raw", to=out, only=only)
    assert done.path.read_bytes() == good
    assert "host" in done.sources


def test_progress_counts_what_is_read(config: dict[str, Any], out: Path) -> None:
    told: list[tuple[int, int]] = []
    export_from(
        config, "raw", to=out, only=("big",), watch=lambda done, total: told.append((done, total))
    )
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] >= 480_000
