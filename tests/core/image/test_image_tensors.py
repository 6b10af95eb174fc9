"""Tensors of every kind: bit for bit, tied as they were, in an order that safetensors opens."""

from __future__ import annotations

import struct
import warnings

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_help import bits, load, make_image, restore, saved_and_loaded
from torch import nn

from tierfall.core.image.layout import plan_layout
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors.tensors import as_bytes
from tierfall.core.types.errors import CaptureError, RestoreError

DTYPES = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of any unquantized dtype with random bits: for floats, payloads of not-a-number included."""
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    flat = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return flat.view(dtype).view(shape)


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


# ---- kinds of tensor


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


# ---- names and order


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
@settings(max_examples=40, deadline=None)
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
