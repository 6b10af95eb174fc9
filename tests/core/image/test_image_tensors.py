"""Tensors of every kind: bit for bit, tied as they were, in an order that safetensors opens."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from image_help import load, make_image, restore, saved_and_loaded
from torch import nn

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
