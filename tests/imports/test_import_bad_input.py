"""What ``tierfall import`` does not take: it says which file, what was expected, and runs no code of it."""

from __future__ import annotations

import builtins
import json
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tierfall
from tests.contract.foreign import hub, save_dcp
from tierfall.config import load_config
from tierfall.core.types.errors import CaptureError, ConfigError, IntegrityError, StepError
from tierfall.imports import dcp_files
from tierfall.imports.importer import import_state, read_state
from tierfall.ops.drain import drain


class Bomb:
    """Creates a file where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return builtins.open, (str(self.trace), "w")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


# Paths -----------------------------------------------------------------------------------------------


def test_a_folder_with_none_or_several_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no checkpoint that can be imported"):
        read_state(tmp_path)
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    assert read_state(tmp_path).format == "torch"
    torch.save({"w": torch.ones(2)}, tmp_path / "b.ckpt")
    with pytest.raises(ConfigError, match=r"holds 2 checkpoints: a\.pt, b\.ckpt; name one"):
        read_state(tmp_path)


# torch.save ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.ones(3), [1, 2], "text", 5])
def test_what_is_no_dict_is_refused(tmp_path: Path, value: object) -> None:
    torch.save(value, tmp_path / "v.pt")
    with pytest.raises(
        ConfigError, match=rf"holds a {type(value).__name__}; expected a state_dict"
    ):
        read_state(tmp_path / "v.pt")


def test_a_value_that_no_state_may_hold_is_named(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "sparse": [torch.eye(3).to_sparse()]}, tmp_path / "s.pt")
    with pytest.raises(CaptureError, match=r"import: .*s\.pt: .*sparse"):
        read_state(tmp_path / "s.pt")


# safetensors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "has 4 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "begins at -8"),
        ({"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}, "the file has 16"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no valid shape"),
        ({"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}, "unknown dtype: 'F7'"),
        ({"dtype": "F32", "shape": [2], "data_offsets": "0, 8"}, "has no offsets"),
        ("text", "damaged, or truncated"),
    ],
)
def test_a_header_is_not_trusted(tmp_path: Path, entry: object, why: str) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(IntegrityError, match=why):
        read_state(path)


@pytest.mark.parametrize(
    ("first", "second"),
    [([0, 8], [4, 12]), ([0, 8], [12, 16]), ([4, 8], [8, 16]), ([0, 4], [4, 8])],
)
def test_tensors_that_overlap_or_leave_bytes_over_are_damage(
    tmp_path: Path, first: list[int], second: list[int]
) -> None:
    """safetensors itself refuses such a file; two tensors of one name leave bytes over, too."""
    entries = {
        name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at}
        for name, at in (("a", first), ("b", second))
    }
    text = json.dumps(entries).encode()
    path = tmp_path / "m.safetensors"
    for header in (text, text.replace(b'"b"', b'"a"')):
        path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(path)
        with pytest.raises(IntegrityError, match=r"begins at|the tensors take"):
            read_state(path)


def test_a_file_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    """Old writers did not pad the header."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    text = json.dumps({"w": entry}).encode()
    text += b" " * (7 - len(text) % 8)
    path = tmp_path / "m.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<2f", 1.5, 2.5))
    read = read_state(path)
    assert read.view.sources[0].tolist() == [1.5, 2.5]


def test_a_shard_that_is_missing_or_lacks_a_tensor(tmp_path: Path) -> None:
    folder = hub(tmp_path / "hub", {"a": torch.ones(2), "b": torch.ones(2)})
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["more"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match=r"'more' is not in model-00001"):
        read_state(index)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors.* is not beside it"):
        read_state(folder)


# DCP -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        b"cos\nsystem\n(S'touch exploded'\ntR.",
        b"c__builtin__\neval\n(S'1'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"ctorch.distributed.checkpoint.metadata\nMetadata.__init__.__globals__\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x01x\x85R.",
    ],
)
def test_no_name_of_a_pickle_is_looked_up(tmp_path: Path, program: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(program)
    with pytest.raises(ConfigError, match="no code of it was run"):
        read_state(tmp_path)


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    """BUILD may set attributes of whatever is on the stack: a class is not to be changed by it."""
    before = dict(vars(dcp_files.Record)), dict(vars(dcp_files.MetadataRecord))
    state = pickle.dumps((None, {"planner_data": "changed", "__setstate__": None}), 2)[2:-1]
    program = b"ctorch.distributed.checkpoint.metadata\nMetadata\n" + state + b"b."
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + program)
    with pytest.raises(IntegrityError):
        read_state(tmp_path)
    assert (dict(vars(dcp_files.Record)), dict(vars(dcp_files.MetadataRecord))) == before


def test_a_class_in_a_value_of_dcp_is_refused(tmp_path: Path, trace: Path) -> None:
    folder = save_dcp(tmp_path / "dcp", {"w": torch.ones(2), "bomb": Bomb(trace)})
    trace.unlink(missing_ok=True)  # DCP itself may have looked at it
    with pytest.raises(ConfigError, match=r"bomb in .* holds more than tensors and plain values"):
        read_state(folder)
    assert not trace.exists()


def changed(folder: Path, change: Callable[[Any], None]) -> Path:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


def test_a_name_leads_outside_of_no_folder(tmp_path: Path) -> None:
    def lead_out(metadata: Any) -> None:
        for record in metadata.storage_data.values():
            record.relative_path = "../" + record.relative_path

    folder = changed(save_dcp(tmp_path / "dcp", {"n": 1, "w": torch.ones(1)}), lead_out)
    with pytest.raises(ConfigError, match="outside of it"):
        read_state(folder)


def test_nothing_is_allocated_for_a_size_that_is_only_claimed(tmp_path: Path) -> None:
    def claim(metadata: Any) -> None:
        metadata.state_dict_metadata["w"].size = torch.Size([1 << 50])

    folder = changed(save_dcp(tmp_path / "dcp", {"w": torch.ones(4)}), claim)
    with pytest.raises(IntegrityError, match=r"would take .* bytes; its records have"):
        read_state(folder)


def test_nothing_is_allocated_for_objects_that_a_pickle_only_claims(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"\x80\x04Nr\xff\xff\xff\x00.")
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            read_state(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_step_that_memory_alone_has_is_drained_first(
    make_config: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    rarely = make_config(disk={"flush": {"every": 2}})
    with tierfall.open(rarely) as ckpt:
        ckpt.save(1, {"w": torch.zeros(4)}).captured(10)
    source = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(4)}, source)
    config = load_config(make_config(disk={}))
    with pytest.raises(StepError, match=r"1@1 .*memory alone.*'tierfall drain'"):
        import_state(config, read_state(source), 7)
    drain(config, None)
    assert import_state(config, read_state(source), 7).tiers == ("disk",)
    assert len(list((tmp_path / "disk" / "run").glob("step-*/commit.json"))) == 2
