"""Tensors of every kind: bit for bit, tied as they were, in an order that safetensors opens."""

from __future__ import annotations

import json
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_help import bits, header_of, load, make_image, restore, saved_and_loaded
from torch import nn

from tierfall.core.image.layout import plan_layout
from tierfall.core.load.fill import plan_fill
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors import dtypes
from tierfall.core.tensors.tensors import as_bytes, copy_whole
from tierfall.core.types.errors import CaptureError, RestoreError
from tierfall.core.types.values import Changes

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any unquantized dtype with random bits: for floats, payloads of not-a-number included."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    flat = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d not in QUANTIZED], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    whole = random_bits(dtype, 4, 6)
    state = {
        "whole": whole,
        "turned": whole.t(),
        "part": whole[1:3, ::2],
        "expanded": whole[:1].expand(3, 6),
        "scalar": random_bits(dtype, 1)[0],
        "empty": random_bits(dtype, 0, 5),
        "rng": None,
    }
    assert state["scalar"].shape == ()
    image, layout = make_image(state)
    loaded = load(image)
    target = {
        "whole": random_bits(dtype, 4, 6),
        "turned": random_bits(dtype, 4, 6).t(),
        "part": random_bits(dtype, 4, 6)[1:3, ::2],
        "expanded": random_bits(dtype, 3, 6),
        "scalar": random_bits(dtype, 1)[0],
        "empty": random_bits(dtype, 0, 5),
        "rng": None,
    }
    addresses = {k: v.data_ptr() for k, v in target.items() if v is not None}
    restore(target, image)
    for key, source in state.items():
        if source is None:
            continue
        for back in (loaded[key], target[key]):
            assert back.dtype is dtype
            assert back.shape == source.shape
            assert bits(back) == bits(source)
        assert target[key].data_ptr() == addresses[key]
    code = dtypes.code_of(dtype)
    assert {placement.dtype for placement in layout.placements} == {code or "U8"}


def test_what_safetensors_reads_is_stored_as_itself() -> None:
    known = set(safetensors.torch._TYPES.values())
    assert known == {d for d in DTYPES if dtypes.code_of(d) is not None}
    assert {safetensors.torch._TYPES[dtypes.code_of(d)] for d in known} == known


def make_quantized(dtype: torch.dtype, scheme: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if scheme == "tensor":
            made = torch._empty_affine_quantized([4, 5], scale=0.3, zero_point=3, dtype=dtype)
        else:
            real = torch.float32 if scheme == "float_channel" else torch.float64
            zero = torch.float32 if scheme == "float_channel" else torch.int64
            made = torch._empty_per_channel_affine_quantized(
                [4, 5],
                scales=torch.rand(4, dtype=real) + 0.1,
                zero_points=torch.arange(4).to(zero),
                axis=0,
                dtype=dtype,
            )
    flat = as_bytes(made)
    assert flat is not None
    flat.random_()
    return made


def quantizer(tensor: torch.Tensor) -> object:
    if tensor.qscheme() == torch.per_tensor_affine:
        return tensor.q_scale(), tensor.q_zero_point()
    return (
        tensor.q_per_channel_scales().tolist(),
        tensor.q_per_channel_zero_points().tolist(),
        tensor.q_per_channel_scales().dtype,
        tensor.q_per_channel_axis(),
    )


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("scheme", ["tensor", "channel", "float_channel"])
@pytest.mark.parametrize("dtype", sorted(QUANTIZED, key=str), ids=str)
def test_quantized_tensor_comes_back_with_scale_and_zero_point(
    dtype: torch.dtype, scheme: str
) -> None:
    module = nn.Module()
    module.register_buffer("q", make_quantized(dtype, scheme))
    image, _ = make_image({"m": module, "rng": None})
    target = nn.Module()
    target.register_buffer("q", make_quantized(dtype, scheme))
    buffer = target.q
    restore({"m": target, "rng": None}, image)
    assert target.q is buffer
    for back in (load(image)["m"]["q"], target.q):
        assert back.dtype is dtype
        assert back.shape == module.q.shape
        assert as_bytes(back).tolist() == as_bytes(module.q).tolist()
        assert quantizer(back) == quantizer(module.q)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_tensor_does_not_go_into_another_scheme() -> None:
    image, _ = make_image({"q": make_quantized(torch.qint8, "tensor"), "rng": None})
    with pytest.raises(RestoreError, match="per_tensor_affine"):
        restore({"q": make_quantized(torch.qint8, "channel"), "rng": None}, image)
    with pytest.raises(
        RestoreError, match=r"q: the checkpoint has qint8 \(4, 5\), the state has int8"
    ):
        restore({"q": torch.zeros(4, 5, dtype=torch.int8), "rng": None}, image)


@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_quantized_tensor_without_a_scale_is_refused_on_either_side() -> None:
    unscaled = torch.empty(4, 5, dtype=torch.qint8)
    with pytest.raises(CaptureError, match=r'state\["q"\].*without a scale') as caught:
        walk_state({"q": unscaled})
    assert isinstance(caught.value.__cause__, RuntimeError)
    image, _ = make_image({"q": make_quantized(torch.qint8, "tensor"), "rng": None})
    with pytest.raises(RestoreError, match=r"q: cannot be restored into: .*without a scale"):
        restore({"q": unscaled, "rng": None}, image)


# ---- kinds of tensor


def test_conjugated_and_negated_views_are_written_as_they_read() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    state = {"c": base.conj(), "b": base, "n": base.conj().imag, "rng": None}
    assert state["n"].is_neg()
    assert as_bytes(state["c"]) is None
    loaded = saved_and_loaded(state)
    assert torch.equal(loaded["c"], base.conj().resolve_conj())
    assert torch.equal(loaded["b"], base)
    assert torch.equal(loaded["n"], -base.imag)
    image, _ = make_image(state)
    target = {"c": torch.zeros(4, dtype=torch.complex64).conj(), "b": torch.zeros_like(base)}
    restore({**target, "n": torch.zeros(4, dtype=torch.complex64).conj().imag, "rng": None}, image)
    assert torch.equal(target["c"], base.conj())


def test_gradients_and_inference_tensors_are_no_obstacle() -> None:
    with torch.inference_mode():
        made = torch.arange(6.0).view(2, 3)
    state = {"i": made, "t": made.t(), "g": torch.ones(2, requires_grad=True) * 2, "rng": None}
    image, _ = make_image(state)
    with torch.inference_mode():
        target = {"i": torch.zeros(2, 3), "t": torch.zeros(2, 3).t()}
    restore({**target, "g": torch.zeros(2, requires_grad=True), "rng": None}, image)
    assert target["i"].tolist() == made.tolist()
    assert target["t"].tolist() == made.t().tolist()


def test_bytes_are_a_view_where_elements_lie_in_order() -> None:
    for tensor in (torch.ones(2, 3), torch.tensor(1.0), torch.ones(3, requires_grad=True)):
        flat = as_bytes(tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert flat.shape == (tensor.numel() * 4,)
        assert not flat.requires_grad
    assert as_bytes(torch.ones(2, 3).t()) is None
    assert as_bytes(torch.empty(0, 3)).shape == (0,)


@given(st.integers(0, 15), st.sampled_from([torch.complex128, torch.float64, torch.int16]))
@settings(deadline=None)
def test_copy_whole_needs_no_alignment(offset: int, dtype: torch.dtype) -> None:
    source = random_bits(dtype, 3, 4).t()
    length = 12 * dtype.itemsize
    target = torch.zeros(length + 16, dtype=torch.uint8)
    copy_whole(target[offset : offset + length], source)
    assert target[offset : offset + length].tolist() == bits(source.clone().contiguous())


class Sub(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse(), "layout"),
        (lambda: torch.eye(3).to_sparse_csr(), "layout"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
            "nested",
        ),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (lambda: torch.ones(2).as_subclass(Sub), "Sub"),
        (lambda: nn.Parameter(torch.ones(2).as_subclass(Sub)), "Sub"),
        (lambda: nn.UninitializedParameter(), "uninitialized"),
    ],
)
def test_unsupported_tensor_is_refused_with_its_path(make: object, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        walk_state({"model": {"layer.weight": make()}})
    assert 'state["model"]["layer.weight"]' in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("start", [0, 100])
@pytest.mark.parametrize("left_bytes", [0, 396, 400])
def test_a_storage_that_was_freed_or_cut_off_is_refused(start: int, left_bytes: int) -> None:
    """What FSDP does with flat parameters between uses; the address of a view in the middle is not even null then."""
    flat = torch.arange(1000.0)
    tensor = flat[start : start + 100]
    image, _ = make_image({"t": tensor.clone(), "rng": None})
    flat.untyped_storage().resize_(left_bytes)
    if start == 0 and left_bytes == 400:
        walk_state({"t": tensor})
        return
    with pytest.raises(CaptureError, match="freed"):
        walk_state({"t": tensor})
    with pytest.raises(RestoreError, match="freed"):
        restore({"t": tensor, "rng": None}, image)


# ---- aliases


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    shared = torch.arange(6.0)
    state = {
        "a": shared,
        "b": [shared.view(6), shared.detach()],
        "c": shared.view(2, 3),
        "rng": None,
    }
    image, layout = make_image(state)
    assert len(layout.placements) == 2
    loaded = load(image)
    assert loaded["a"] is loaded["b"][0]
    assert loaded["a"] is loaded["b"][1]
    assert loaded["c"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tied_data_fills_both_untied_targets() -> None:
    shared = torch.arange(6.0)
    image, _ = make_image({"a": shared, "b": shared, "rng": None})
    target = {"a": torch.zeros(6), "b": torch.zeros(12)[::2], "rng": None}
    restore(target, image)
    assert torch.equal(target["a"], shared)
    assert torch.equal(target["b"], shared)


def test_untied_data_into_tied_targets_is_refused_unless_lenient() -> None:
    image, _ = make_image({"a": torch.ones(3), "b": torch.full((3,), 2.0), "rng": None})
    shared = torch.zeros(3)
    with pytest.raises(RestoreError, match=r"[ab] shares memory with [ab]"):
        restore({"a": shared, "b": shared, "rng": None}, image)
    assert shared.tolist() == [0, 0, 0]
    restore({"a": shared, "b": shared, "rng": None}, image, strict=False)
    assert shared.tolist() == [1, 1, 1]


def test_one_tensor_into_targets_that_overlap_in_part_is_refused() -> None:
    shared = torch.arange(6.0)
    image, _ = make_image({"a": shared, "b": shared, "rng": None})
    memory = torch.zeros(12)
    with pytest.raises(RestoreError, match=r"[ab] shares memory with [ab]"):
        restore({"a": memory[:6], "b": memory[5:11], "rng": None}, image)
    with pytest.raises(RestoreError, match=r"[ab] shares memory with [ab]"):
        restore({"a": memory[:6], "b": memory[1::2], "rng": None}, image, strict=False)
    assert memory.tolist() == [0] * 12
    beside = {"a": memory[:6], "b": memory[6:], "rng": None}
    restore(beside, image)
    assert memory.tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_overlapping_views_are_each_stored_whole() -> None:
    base = torch.arange(5.0)
    state = {"x": base[:4], "y": base[1:], "z": base.view(torch.int32), "s": base[::2], "rng": None}
    _, layout = make_image(state)
    assert sorted(placement.end - placement.start for placement in layout.placements) == [
        12,
        16,
        16,
        20,
    ]
    loaded = saved_and_loaded(state)
    assert all(torch.equal(loaded[k], state[k]) for k in "xyzs")


def test_a_square_and_its_transpose_are_no_aliases() -> None:
    square = torch.arange(4.0).view(2, 2)
    loaded = saved_and_loaded({"x": square, "t": square.t()})
    assert loaded["x"].tolist() == [[0, 1], [2, 3]]
    assert loaded["t"].tolist() == [[0, 2], [1, 3]]


def test_empty_tensors_are_not_taken_for_aliases() -> None:
    loaded = saved_and_loaded(
        {"a": torch.empty(0, 2), "b": torch.empty(0, 3), "c": torch.empty(0, 2)}
    )
    assert [tuple(loaded[k].shape) for k in "abc"] == [(0, 2), (0, 3), (0, 2)]


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(1, 2).expand(3, 2),
        torch.zeros(3, 1).expand(3, 2),
        torch.zeros(1).expand(3, 2),
        torch.zeros(4).as_strided((3, 2), (1, 1)),
    ],
)
def test_target_whose_elements_share_memory_is_refused_before_anything_is_written(
    target: torch.Tensor,
) -> None:
    image, _ = make_image({"a": torch.ones(2), "t": torch.ones(3, 2), "rng": None})
    with pytest.raises(
        RestoreError, match=r"t: cannot be restored into: its elements share memory; clone it first"
    ):
        plan_fill({"a": torch.zeros(2), "t": target, "rng": None}, header_of(image))


def test_target_whose_strides_only_look_shared_is_filled() -> None:
    image, _ = make_image({"t": torch.arange(6.0).view(1, 3, 2), "rng": None})
    target = torch.zeros(2, 3).t().expand(1, 3, 2)  # one element long there: no memory is shared
    restore({"t": target, "rng": None}, image)
    assert target.tolist() == [[[0, 1], [2, 3], [4, 5]]]


def test_a_tensor_that_anything_may_change_is_anytime_everywhere() -> None:
    weight = nn.Parameter(torch.ones(2))
    view = walk_state({"w": weight, "rng": None})
    assert view.tensors[0].changes is Changes.ON_STEP
    view = walk_state({"w": weight, "again": weight.detach(), "rng": None})
    assert [t.changes for t in view.tensors] == [Changes.ANYTIME]


# ---- names and order


def test_names_are_injective_and_say_where_a_tensor_stands() -> None:
    def t() -> torch.Tensor:
        return torch.ones(1)

    state = {
        "a": {"b": t(), "b.c": t(), "b%2Ec": t(), "b/c": t()},
        "a.b": t(),
        "": {"": t()},
        0: t(),
        "0": t(),
        True: t(),
        "%i0": t(),
        None: t(),
        (1, "x.y"): t(),
        b"k": t(),
        2.5: t(),
        "\ud800": t(),
        "ключ": t(),
        "__metadata__": t(),
        "list": [t(), (t(),)],
        "rng": None,
    }
    image, layout = make_image(state)
    names = [placement.name for placement in layout.placements]
    assert len(set(names)) == len(names) == 19
    assert {"a.b", "a.b%2Ec", "a.b%252Ec", "a.b%2Fc", "a%2Eb", "%e.%e", "%i0", "0", "%b1"} <= set(
        names
    )
    assert {"%n", "%25i0", "%uD800", "ключ", "%5F_metadata__", "list.0", "list.1.0"} <= set(names)
    loaded = load(image)
    assert list(loaded) == list(state)
    assert torch.equal(loaded[(1, "x.y")], t())
    restore(state, image)


@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=()), max_size=5), st.integers(0, 3), max_size=8
    )
)
@settings(deadline=None)
def test_any_text_may_be_a_key(
    tmp_path_factory: pytest.TempPathFactory, lengths: dict[str, int]
) -> None:
    state = {"k": {key: torch.full((n,), n) for key, n in lengths.items()}, "rng": None}
    image, layout = make_image(state)
    assert len({placement.name for placement in layout.placements}) == len(lengths)
    opened = safetensors.torch.load(image)
    assert sorted(opened) == sorted(placement.name for placement in layout.placements)
    assert {k: v.tolist() for k, v in load(image)["k"].items()} == {
        k: v.tolist() for k, v in state["k"].items()
    }


shapes = st.lists(st.integers(0, 4), max_size=3)
tensors = st.tuples(st.sampled_from([d for d in DTYPES if d not in QUANTIZED]), shapes).map(
    lambda drawn: random_bits(drawn[0], *drawn[1])
)
trees = st.recursive(
    tensors,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=10,
)


def flattened(tree: object) -> list[tuple[torch.dtype, tuple[int, ...], list[int]]]:
    if isinstance(tree, torch.Tensor):
        return [(tree.dtype, tuple(tree.shape), bits(tree))]
    children = tree.values() if isinstance(tree, dict) else tree
    return [leaf for child in children for leaf in flattened(child)]


@given(trees)
@settings(max_examples=150, deadline=None)
def test_any_tree_of_tensors_comes_back(tree: object) -> None:
    state = {"tree": tree, "rng": None}
    image, layout = make_image(state)
    assert flattened(load(image)["tree"]) == flattened(tree)
    ends = [0]
    for placement in layout.placements:
        assert placement.start == ends[-1]
        ends.append(placement.end)
    assert ends[-1] == layout.data_bytes
    safetensors.torch.load(image)


def test_order_is_by_item_size_and_then_by_name() -> None:
    state = {
        "z": torch.ones(1, dtype=torch.float64),
        "a": torch.ones(3, dtype=torch.int8),
        "b": torch.ones(1, dtype=torch.complex128),
        "d": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.ones(1, dtype=torch.int64),
        "rng": None,
    }
    _, layout = make_image(state)
    assert [placement.name for placement in layout.placements] == ["b", "c", "z", "d", "a"]
    again = plan_layout(walk_state(dict(reversed(state.items()))))
    assert [placement.name for placement in again.placements] == [
        placement.name for placement in layout.placements
    ]


def test_safetensors_opens_an_image(tmp_path: Path) -> None:
    state = {"w": {"x": torch.randn(3, 4), "y": torch.ones(2, dtype=torch.bfloat16)}, "n": 1}
    image, _ = make_image(state)
    path = tmp_path / "rank.safetensors"
    path.write_bytes(image)
    opened = safetensors.torch.load_file(path)
    assert torch.equal(opened["w.x"], state["w"]["x"])
    assert torch.equal(opened["w.y"], state["w"]["y"])
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_data_starts_at_64_kib_with_4_kib_to_spare() -> None:
    image, layout = make_image({"w": torch.ones(3), "rng": None})
    assert layout.data_start == 65536
    (length,) = struct.unpack("<Q", image[:8])
    assert length == layout.data_start - 8
    assert image[8 : 8 + length].rstrip(b" ").endswith(b"}")
    # A header that ends within 4 KiB of the boundary moves the data to the next one.
    for fill in range(60_000, 62_000, 500):
        view = walk_state({"v": ["x" * 10_000] * 6 + ["y" * (fill - 60_000)], "rng": None})
        found = plan_layout(view)
        used = len(found.header(view).rstrip(b" "))
        assert found.data_start % 65536 == 0
        assert found.data_start - 65536 < used + 4096 <= found.data_start


def test_structure_is_equal_for_equal_states_only() -> None:
    def make(**more: object) -> dict[str, object]:
        return {"w": torch.randn(3), "n": 5, "rng": None, **more}

    one, other = plan_layout(walk_state(make())), plan_layout(walk_state(make(n="another value")))
    assert one.structure == other.structure
    assert one.structure.startswith("sha256:")
    for different in (make(w=torch.ones(4)), make(w=torch.ones(3).double()), make(x=1), {"w": 1}):
        view = walk_state(different)
        assert not one.matches(view)
        assert plan_layout(view).structure != one.structure


def test_keys_that_compare_equal_are_still_different_structures() -> None:
    one = plan_layout(walk_state({"d": {1: torch.ones(1)}, "rng": None}))
    assert not one.matches(walk_state({"d": {True: torch.ones(1)}, "rng": None}))
    assert not one.matches(walk_state({"d": {1.0: torch.ones(1)}, "rng": None}))


def test_pieces_tell_true_dtype_shape_and_range() -> None:
    _, layout = make_image({"c": torch.ones(2, 2, dtype=torch.complex128), "rng": None})
    assert json.loads(layout.pieces) == [
        {
            "name": "c",
            "dtype": "complex128",
            "shape": [2, 2],
            "offset": [0, 0],
            "lengths": [2, 2],
            "start": 0,
            "end": 64,
        }
    ]


def test_ten_thousand_tensors_stay_one_image() -> None:
    state = {"t": [torch.full((2,), i) for i in range(10_000)], "rng": None}
    image, layout = make_image(state)
    header = header_of(image)
    assert len(header.tensors) == 10_000
    assert layout.matches(walk_state(state))
    assert load(image)["t"][9_999].tolist() == [9_999, 9_999]


def test_source_tensor_tells_its_path() -> None:
    view = walk_state({"m": nn.Linear(1, 1), "x": [{("k", 1): torch.ones(1)}], "rng": None})
    assert [t.path for t in view.tensors] == [
        'state["m"]["weight"]',
        'state["m"]["bias"]',
        "state[\"x\"][0][('k', 1)]",
    ]
