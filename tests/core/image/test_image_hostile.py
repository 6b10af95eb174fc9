"""Untrusted headers: any error in them is an IntegrityError; nothing is executed, no excess memory is allocated."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_help import header_of, make_image
from torch import nn

from tierfall.core.image.header import read_header
from tierfall.core.image.layout import TensorParts, plan_layout
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import plan_load
from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import IntegrityError, NotSupportedError, TierfallError


def sample() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "c": torch.ones(2, dtype=torch.complex128),
        "b": b"x" * 70_000,
        "list": [torch.ones(1), {"t": (torch.ones(2), 1)}],
        "n": {"x": 1, "y": (1, {2})},
    }


IMAGE, LAYOUT = make_image(sample())
MATRIX = [placement.name for placement in LAYOUT.placements].index("model.weight")
"""The place in the table of a tensor of three rows and two columns."""


def rebuilt(change: Callable[[dict[str, Any], dict[str, Any], list[Any]], None]) -> bytes:
    """The sample with its header parsed, changed and written again."""
    table = json.loads(IMAGE[8 : LAYOUT.data_start])
    static = json.loads(table["__metadata__"]["tierfall"])
    values = json.loads(table["__metadata__"]["tierfall.values"])
    change(table, static, values)
    if isinstance(table.get("__metadata__"), dict):
        if "tierfall" in table["__metadata__"]:
            table["__metadata__"].setdefault("tierfall", "")
            table["__metadata__"]["tierfall"] = json.dumps(static)
        if "tierfall.values" in table["__metadata__"]:
            table["__metadata__"]["tierfall.values"] = json.dumps(values)
    return with_header(json.dumps(table).encode())


def with_header(text: bytes) -> bytes:
    padded = text.ljust(LAYOUT.data_start - 8)
    return struct.pack("<Q", len(padded)) + padded + IMAGE[LAYOUT.data_start :]


def refused(image: bytes, match: str = "") -> None:
    with pytest.raises(IntegrityError, match=match or "the image") as caught:
        header_of(image)
    assert str(caught.value).startswith("the image: ")


def first(table: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in table.items() if name != "__metadata__")


TABLE: dict[str, Callable[[dict[str, Any]], object]] = {
    "overlap": lambda t: first(t).update(data_offsets=[0, first(t)["data_offsets"][1] + 4]),
    "start beyond end": lambda t: first(t).update(data_offsets=[8, 0]),
    "negative": lambda t: first(t).update(data_offsets=[-8, first(t)["data_offsets"][1] - 8]),
    "huge": lambda t: first(t).update(shape=[1 << 61], data_offsets=[0, 8 << 61]),
    "float offset": lambda t: first(t).update(data_offsets=[0.0, first(t)["data_offsets"][1]]),
    "bool offset": lambda t: first(t).update(data_offsets=[False, first(t)["data_offsets"][1]]),
    "three offsets": lambda t: first(t).update(data_offsets=[0, 8, 8]),
    "no offsets": lambda t: first(t).pop("data_offsets"),
    "unknown dtype": lambda t: first(t).update(dtype="F128"),
    "dtype list": lambda t: first(t).update(dtype=["F32"]),
    "other dtype": lambda t: first(t).update(dtype="F16"),
    "negative shape": lambda t: first(t).update(shape=[-1, -2]),
    "shape of floats": lambda t: first(t).update(shape=[2.0]),
    "shape of bools": lambda t: first(t).update(shape=[True, 2]),
    "shape is text": lambda t: first(t).update(shape="2"),
    "endless shape": lambda t: first(t).update(shape=[1] * 5000 + [2]),
    "zero times huge": lambda t: first(t).update(shape=[0, 1 << 63]),
    "more members": lambda t: first(t).update(more=1),
    "entry is a list": lambda t: t.update({next(reversed(t)): []}),
    "tensor missing": lambda t: t.pop(next(reversed(t))),
    "tensor between": lambda t: t.pop(list(t)[3]),
    "tensor more": lambda t: t.update(more={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "no metadata": lambda t: t.pop("__metadata__"),
    "metadata is text": lambda t: t.update(__metadata__="x"),
    "no layout": lambda t: t["__metadata__"].pop("tierfall"),
    "no values": lambda t: t["__metadata__"].pop("tierfall.values"),
}


@pytest.mark.parametrize("name", TABLE)
def test_damaged_table_is_refused(name: str) -> None:
    refused(rebuilt(lambda table, static, values: TABLE[name](table)))


def entry(static: dict[str, Any], key: str) -> Any:
    _, _, keys, nodes = static["tree"]
    return nodes[keys.index(key)]


def swap(static: dict[str, Any], key: str, node: object) -> None:
    _, _, keys, nodes = static["tree"]
    nodes[keys.index(key)] = node


def deep(levels: int) -> object:
    node: object = 0
    for _ in range(levels):
        node = ["l", [node]]
    return node


TREE: dict[str, Callable[[dict[str, Any]], object]] = {
    "no tree": lambda s: s.pop("tree"),
    "tree is a tensor": lambda s: s.update(tree=0),
    "tree is a value": lambda s: s.update(tree=["v", 0]),
    "no dtypes": lambda s: s.pop("dtypes"),
    "dtype beyond": lambda s: s["dtypes"].append([10_000, "complex128", [2]]),
    "dtype negative": lambda s: s["dtypes"].append([-1, "complex128", [2]]),
    "dtype unknown": lambda s: s["dtypes"][0].__setitem__(1, "complex256"),
    "dtype of another size": lambda s: s["dtypes"][0].__setitem__(2, [3]),
    "dtype shape negative": lambda s: s["dtypes"][0].__setitem__(2, [-2]),
    "dtype of a typed tensor": lambda s: s["dtypes"].append([1, "complex128", [1]]),
    "dtype entry short": lambda s: s["dtypes"].append([1]),
    "dtype made quantized": lambda s: s["dtypes"][0].__setitem__(slice(1, 3), ["qint8", [32]]),
    "strides are an object": lambda s: s.update(strides={"0": [1]}),
    "strides beyond": lambda s: s.update(strides=[[10_000, [1]]]),
    "strides of a tensor before the first": lambda s: s.update(strides=[[-1, [1]]]),
    "strides of true": lambda s: s.update(strides=[[True, [1]]]),
    "strides short": lambda s: s.update(strides=[[MATRIX]]),
    "strides of more dimensions": lambda s: s.update(strides=[[MATRIX, [1, 3, 6]]]),
    "strides that overlap": lambda s: s.update(strides=[[MATRIX, [1, 1]]]),
    "strides of nothing": lambda s: s.update(strides=[[MATRIX, [0, 0]]]),
    "strides with holes": lambda s: s.update(strides=[[MATRIX, [1, 4]]]),
    "strides backwards": lambda s: s.update(strides=[[MATRIX, [-1, 3]]]),
    "strides of floats": lambda s: s.update(strides=[[MATRIX, [1.0, 3.0]]]),
    "no strides": lambda s: s.pop("strides"),
    "no types": lambda s: s.pop("types"),
    "no digest of the table": lambda s: s.pop("table"),
    "types are a list": lambda s: s.update(types=["optimizer"]),
    "types of numbers": lambda s: s.update(types={"optimizer": 7}),
    "position beyond": lambda s: swap(s, "c", 10_000),
    "position negative": lambda s: swap(s, "c", -1),
    "position is bool": lambda s: swap(s, "c", True),
    "position is float": lambda s: swap(s, "c", 0.0),
    "position left out": lambda s: swap(s, "c", 1),
    "value beyond": lambda s: swap(s, "n", ["v", 10_000]),
    "value twice": lambda s: swap(s, "n", list(entry(s, "b"))),
    "value is bool": lambda s: swap(s, "n", ["v", True]),
    "blob left out": lambda s: entry(s, "b").pop(),
    "unknown kind": lambda s: swap(s, "c", ["z", 0]),
    "empty node": lambda s: swap(s, "c", []),
    "node is text": lambda s: swap(s, "c", "x"),
    "node is null": lambda s: swap(s, "c", None),
    "node is an object": lambda s: swap(s, "c", {"d": 1}),
    "mapping of no kind": lambda s: s["tree"].__setitem__(1, "defaultdict"),
    "keys and nodes differ": lambda s: s["tree"][2].append("more"),
    "key twice": lambda s: s["tree"][2].__setitem__(0, s["tree"][2][1]),
    "key is a number": lambda s: s["tree"][2].__setitem__(0, 5),
    "key cannot be hashed": lambda s: s["tree"][2].__setitem__(0, [[1]]),
    "key is a blob": lambda s: s["tree"][2].__setitem__(0, [{"%": "blob", "k": "bytes", "t": 0}]),
    "module keys differ": lambda s: entry(s, "model")[1].append("more"),
    "module key is a number": lambda s: entry(s, "model")[1].__setitem__(0, 3),
    "module key twice": lambda s: entry(s, "model")[1].__setitem__(0, entry(s, "model")[1][1]),
    "module names differ": lambda s: entry(s, "model").__setitem__(2, ["x"]),
    "optimizer names": lambda s: entry(s, "optimizer")[1].__setitem__(0, 7),
    "optimizer number": lambda s: entry(s, "optimizer")[2][0][0].__setitem__(0, 99),
    "optimizer lacks one": lambda s: entry(s, "optimizer")[2][0][0].pop(),
    "optimizer group": lambda s: entry(s, "optimizer")[2].__setitem__(0, [1]),
    "optimizer group node": lambda s: entry(s, "optimizer")[2][0].__setitem__(1, 0),
    "optimizer state": lambda s: entry(s, "optimizer")[3].__setitem__(0, [0, 1, 2]),
    "optimizer state twice": lambda s: entry(s, "optimizer")[3].append([0, 1]),
    "random state inside": lambda s: swap(s, "c", ["l", [["r", 0]]]),
    "quantized": lambda s: swap(s, "c", ["q", 0, "torch.per_tensor_affine", 0, 0]),
    "quantized scheme": lambda s: swap(s, "c", ["q", 0, "torch.other", 0, 0]),
    "wrapper without a value": lambda s: swap(s, "c", ["w", "m:C", ["x"], [0]]),
    "wrapper with a tensor for a value": lambda s: swap(s, "c", ["w", "m:C", ["x"], [0, 1]]),
    "wrapper without nodes": lambda s: swap(s, "c", ["w", "m:C", [], []]),
    "too deep": lambda s: swap(s, "c", deep(200)),
    "much too deep": lambda s: swap(s, "c", deep(400)),
}


@pytest.mark.parametrize("name", TREE)
def test_damaged_tree_is_refused(name: str) -> None:
    refused(rebuilt(lambda table, static, values: TREE[name](static)))


def at_n(values: list[Any], value: object) -> None:
    values[values.index({"x": 1, "y": {"%": "tuple", "v": [1, {"%": "set", "v": [2]}]}})] = value


@pytest.mark.parametrize(
    "value",
    [
        {"%": "nothing", "v": 1},
        {"%": 5},
        {"%": ["tuple"]},
        {"%": "tuple"},
        {"%": "tuple", "v": 5},
        {"%": "set", "v": [[1]]},
        {"%": "dict", "v": [[1]]},
        {"%": "dict", "v": [[[1], 2]]},
        {"%": "dict", "v": {"a": 1}},
        {"%": "int", "v": "zz"},
        {"%": "int", "v": 5},
        {"%": "float", "v": "00"},
        {"%": "float", "v": 1.5},
        {"%": "bytes", "v": "***"},
        {"%": "bytes", "v": "ü"},
        {"%": "dtype", "v": "Tensor"},
        {"%": "dtype", "v": ["float32"]},
        {"%": "size", "v": [1, "2"]},
        {"%": "size", "v": [1 << 70]},
        {"%": "device", "v": "toaster"},
        {"%": "device", "v": 0},
        {"%": "scalar", "d": "O", "v": "00"},
        {"%": "scalar", "d": "f4,f4", "v": "0000000000000000"},
        {"%": "scalar", "d": "<f4", "v": "00"},
        {"%": "scalar", "d": "<U999999999999", "v": ""},
        {"%": "scalar", "d": "<f4", "v": "zz"},
        {"%": "blob", "k": "bytes", "t": 0},
        {"%": "blob", "k": "bytes", "t": True},
        {"%": "blob", "k": "array", "t": 0, "d": "<f4", "s": [1 << 62]},
        {"%": "codec", "n": 5, "v": 1},
        {"%": "codec", "n": "x"},
    ],
    ids=str,
)
def test_damaged_value_is_refused(value: object) -> None:
    refused(rebuilt(lambda table, static, values: at_n(values, value)))


@pytest.mark.parametrize(
    "members",
    [
        {"k": "pickle"},
        {"k": "array"},
        {"k": "array", "d": "<f4", "s": [1]},
        {"k": "array", "d": "|O8", "s": [8750]},
        {"k": "array", "d": "<f4", "s": [-17_500, -1]},
        {"k": "array", "d": "|V0", "s": [1 << 61]},
        {"k": "generator"},
        {"k": "generator", "d": "toaster"},
        {"t": 1},
        {"t": -1},
    ],
    ids=str,
)
def test_damaged_blob_is_refused(members: dict[str, Any]) -> None:
    def change(table: object, static: object, values: list[Any]) -> None:
        blob = next(v for v in values if isinstance(v, dict) and v.get("k") == "bytes")
        blob.update(members)

    refused(rebuilt(change))


def test_text_that_is_no_text_is_damage_when_it_is_read() -> None:
    def change(table: object, static: object, values: list[Any]) -> None:
        next(v for v in values if isinstance(v, dict) and v.get("k") == "bytes")["k"] = "str"

    plan = plan_load(header_of(rebuilt(change)))
    for each in plan.targets:
        each.target.fill_(0xFF)
    with pytest.raises(IntegrityError, match="a value is damaged"):
        plan.finish()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b'{"__metadata__":{"tierfall":"[]","tierfall.values":"[]"}}',
        b'{"__metadata__":{"tierfall":"{","tierfall.values":"[]"}}',
        b'{"a":NaN}',
        b"[" * 60_000,
        b'{"a":' * 10_000,
        b"\xff\xfe",
        b'{"a":{},"a":{}}',
        b'{"a":' + b"1" * 5000 + b"}",
    ],
    ids=lambda text: text[:20].decode("latin-1"),
)
def test_header_that_is_not_one_is_refused(text: bytes) -> None:
    refused(with_header(text))


def test_member_that_stands_twice_is_refused() -> None:
    text = IMAGE[8 : LAYOUT.data_start].rstrip(b" ")
    assert text.count(b'{"dtype":') > 1
    refused(with_header(text.replace(b'{"dtype":', b'{"dtype":"F16","dtype":', 1)), "twice")


@pytest.mark.parametrize("members", [{"format": 2}, {"requires": ["planes"]}])
def test_newer_format_is_reported_to_be_newer(members: dict[str, Any]) -> None:
    with pytest.raises(NotSupportedError, match="newer"):
        header_of(rebuilt(lambda table, static, values: static.update(members)))


def test_plain_safetensors_file_is_not_ours() -> None:
    import safetensors.torch

    data = safetensors.torch.save({"w": torch.ones(2)})
    with pytest.raises(IntegrityError, match="not written by tierfall"):
        read_header(data, image_bytes=len(data), what="x")


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_any_flipped_byte_of_a_header_is_read_or_refused(data: st.DataObject) -> None:
    used = len(IMAGE[: LAYOUT.data_start].rstrip(b" "))
    damaged = bytearray(IMAGE)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, used - 1))] = data.draw(st.integers(0, 255))
    try:
        header = header_of(bytes(damaged))
        plan_load(header)
        plan_fill(sample(), header)
    except TierfallError:
        return
    assert header.data_bytes == LAYOUT.data_bytes


PARTS: list[Any] = [
    [],
    [[0, 8]],
    [[0, 24], [1, 8]],
    [[0, 8], [1, 8], [0, 24]],
    [[0, 6], [1, 24]],
    [[0, 8], [1, 32]],
    [[0, -8], [1, 24]],
    [[-1, 8], [1, 24]],
    [[0, True], [1, 24]],
    [[0], [1, 24]],
    "01",
    None,
]


@pytest.mark.parametrize("parts", [[[0, 8], [1, 24]], *PARTS])
def test_a_tensor_that_is_not_the_sum_of_its_parts_is_refused(parts: Any) -> None:
    view = walk_state(sample())
    number = view.names.index("model.weight")
    layout = plan_layout(view, {number: TensorParts(parts=((0, 8), (1, 24)), own=0)})
    header = layout.header(view)
    assert header is not None
    table = json.loads(header[8:])
    static = json.loads(table["__metadata__"]["tierfall"])
    static["elsewhere"][0][3] = parts
    table["__metadata__"]["tierfall"] = json.dumps(static)
    text = json.dumps(table).encode().ljust(len(header) - 8)
    image = struct.pack("<Q", len(text)) + text + bytes(layout.data_bytes)
    if parts in PARTS:
        refused(image, "model.weight|elsewhere")
    else:
        assert header_of(image).writers == {0, 1}
