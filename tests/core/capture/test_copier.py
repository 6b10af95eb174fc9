"""Copying into an image: every byte in its place, each digest of its chunk, the watermark above final bytes only."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copier_help import KIB, check, make, raw, wanted
from hypothesis import given, settings
from hypothesis import strategies as st

import tierfall
from tierfall.core.image import segments
from tierfall.core.image import segments as module
from tierfall.core.image.layout import plan_layout
from tierfall.core.image.sources import TensorSources
from tierfall.core.sampling.image_check import CheckPlan
from tierfall.core.state.walk import walk_state
from tierfall.core.tensors.tensors import as_bytes
from tierfall.core.types.errors import StateChangedError


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def lazily(**tensors: Any) -> dict[str, Any]:
    """A state whose tensors change inside the optimizer's step alone."""
    return {"on": tierfall.item(tensors, changes="on_step"), "rng": None}


def mixed() -> dict[str, Any]:
    """Whatever makes copying differ: layouts, sizes, dtypes, and tensors that lie across the borders of chunks."""
    return lazily(**_mixed())


def _mixed() -> dict[str, Any]:
    return {
        "wide": noise(7, 1000),
        "turned": noise(130, 77).t(),
        "strided": noise(4000)[::3],
        "expanded": noise(1, 5).expand(400, 5),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "halves": noise(3333, dtype=torch.bfloat16),
        "bytes": noise(5001, dtype=torch.uint8),
        "flags": noise(77) > 0,
        "many": [noise(3, seed=n) for n in range(40)],
        "text": "any value",
    }


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many segments, though the tensors of a test are small."""
    monkeypatch.setattr(module, "BATCH_BYTES", 1000)
    monkeypatch.setattr(module, "SEGMENT_BYTES", 2500)


# What comes out --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_segments")
def test_every_byte_is_in_its_place_when_it_comes_in_many_segments() -> None:
    made = make(mixed())
    image = wanted(made.layout, made.view)
    made.filling.run()
    check(made, image)
    assert len(made.told) > 5


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float64]),
            st.integers(0, 3000),
            st.sampled_from(["plain", "strided", "anytime", "strided anytime"]),
        ),
        max_size=8,
    ),
    st.sampled_from([4 * KIB, 8 * KIB, 20 * KIB]),
)
def test_any_mixture_of_tensors(parts: list[tuple[torch.dtype, int, str]], chunk: int) -> None:
    kept: dict[str, Any] = {}
    for number, (dtype, length, how) in enumerate(parts):
        tensor = noise(length * 2 if "strided" in how else length, dtype=dtype, seed=number)
        tensor = tensor[::2] if "strided" in how else tensor
        changes = "anytime" if "anytime" in how else "on_step"
        kept[f"t{number}"] = tierfall.item(tensor, changes=changes)  # type: ignore[arg-type]
    made = make({**kept, "rng": None}, chunk)
    made.filling.run()
    check(made, wanted(made.layout, made.view))


# Changes under the capture ---------------------------------------------------------------------------


SHAPES: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: noise(300_000),
    "matrix": lambda: noise(512, 1024),
    "bfloat16": lambda: noise(512, 1024).to(torch.bfloat16),
    "bytes": lambda: torch.arange(100_003, dtype=torch.int64).to(torch.uint8),
    "transposed": lambda: noise(512, 1024).t(),
    "channels last": lambda: noise(16, 32, 24, 24).to(memory_format=torch.channels_last),
    "between others": lambda: noise(500_001)[3:400_004],
    "short": lambda: noise(37),
    "a number": lambda: torch.tensor(3.0),
}


def writes(shape: torch.Size, seed: int) -> dict[str, torch.Tensor]:
    """Each a mask of one percent of the elements, in a pattern of its own; or one element, where that is more."""
    random = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    some = max(1, -(-count // 100))
    start = int(torch.randint(max(1, count - some), (), generator=random))
    masks = {"in a row": torch.zeros(count, dtype=torch.bool)}
    masks["in a row"][start : start + some] = True
    masks["all over"] = torch.zeros(count, dtype=torch.bool)
    masks["all over"][torch.randperm(count, generator=random)[:some]] = True
    return {name: mask.view(shape) for name, mask in masks.items()}


@pytest.mark.parametrize("kind", SHAPES)
def test_a_write_to_one_percent_of_a_tensor_is_found_in_the_image(kind: str) -> None:
    """What came before the copy is in the image and in the live tensor alike: only what save() read tells."""
    source = SHAPES[kind]()
    for seed in range(2):
        for where, mask in writes(source.shape, seed).items():
            made = make(lazily(same=noise(5000), w=source), 1 << 20)
            before = source.clone()
            source.data[mask] += 1
            made.filling.run()
            if seed % 2:  # swapped back before anybody looks
                source.data.copy_(before)
            with pytest.raises(StateChangedError) as caught:
                made.filling.check_image()
            assert caught.value.tensors == ("on.w",), (kind, where)
            source.data.copy_(before)


@pytest.mark.parametrize(
    ("rows", "share"), [(25, 0.1), (64, 0.1), (101, 0.6), (109, 0.1), (303, 0.1), (512, 0.6)]
)
def test_a_block_of_columns_is_found_whatever_the_length_of_a_row(rows: int, share: float) -> None:
    """The distance of two lines may be the length of a row, or a multiple or a fraction of it."""
    columns = (2 << 20) // 4 // rows
    source = noise(rows, columns)
    for seed in range(2):
        made = make(lazily(w=source), 16 << 20)
        first = int(seed / 2 * (1 - share) * columns)
        source.data[:, first : first + int(share * columns)] += 1
        made.filling.run()
        with pytest.raises(StateChangedError):
            made.filling.check_image()


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return noise(3001)


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "bool": lambda: noise(3001) > 0,
    "float8": lambda: noise(3001).to(torch.float8_e4m3fn),
    "unsigned": lambda: torch.arange(3001).to(torch.uint16),
    "complex": lambda: torch.complex(noise(3001), noise(3001, seed=1)),
    "inferred": inferred,
    "behind a header": lambda: noise(3004)[3:],
    "behind an odd byte": lambda: torch.arange(5001).to(torch.uint8)[1:],
    "one": lambda: noise(1),
    "three bytes": lambda: torch.tensor([1, 2, 3], dtype=torch.uint8),
    "one line": lambda: noise(16),
    "one line and a byte": lambda: torch.arange(66).to(torch.uint8)[1:],
    "nothing but NaN": lambda: torch.full((3001,), float("nan")),
    "zeros": lambda: torch.zeros(3001),
    "a matrix without rows": lambda: torch.empty(0, 5),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("digest_bytes", [0, None])
def test_odd_tensors_are_compared_byte_by_byte(kind: str, digest_bytes: int | None) -> None:
    """One bit of a percent of the bytes: NaN becomes another NaN, and 0.0 may become -0.0."""
    source = ODD[kind]()
    made = make(lazily(w=source, same=noise(5000)), digest_bytes=digest_bytes)
    made.filling.run()
    made.filling.check_state()
    made.filling.check_image()
    assert bytes(made.memory) == wanted(made.layout, made.view)
    live = as_bytes(source.detach())
    assert live is not None
    if not len(live):
        return
    count = -(-len(live) // 100)
    for start in (0, len(live) // 3, len(live) - count):
        made = make(lazily(w=source, same=noise(5000)), digest_bytes=digest_bytes)
        live.data[start : start + count] ^= 1 if kind == "bool" else 1 << 7
        made.filling.run()
        with pytest.raises(StateChangedError) as caught:
            made.filling.check_image()
        assert caught.value.tensors == ("on.w",)


@pytest.mark.parametrize(
    "shape",
    [
        lambda: noise(300_000),
        lambda: noise(500, 600).t(),
        lambda: noise(1, 30, 100, 100).to(memory_format=torch.channels_last),
        lambda: noise(300, 1, 1000).to(torch.complex128).transpose(0, 2),
        lambda: noise(500, 601).to(torch.uint8).t(),
    ],
)
def test_a_full_check_finds_one_element(shape: Callable[[], torch.Tensor]) -> None:
    source = shape()
    same = {"same": noise(5000), "shape": shape()}
    still = make(lazily(w=source, **same), 1 << 20, digest_bytes=None)
    still.filling.run()
    still.filling.check_image()
    for seed in range(4):
        made = make(lazily(w=source, **same), 1 << 20, digest_bytes=None)
        at = int(torch.randint(source.numel(), (), generator=torch.Generator().manual_seed(seed)))
        torch.as_strided(source.data, (source.numel(),), (1,))[at] += 1
        made.filling.run()
        with pytest.raises(StateChangedError) as caught:
            made.filling.check_image()
        assert caught.value.tensors == ("on.w",)


SHORT: dict[str, Callable[[], torch.Tensor]] = {
    "one byte": lambda: torch.tensor(7, dtype=torch.uint8),
    "one number": lambda: torch.tensor(3.0),
    "a byte less than a line": lambda: torch.arange(63).to(torch.uint8),
    "a byte more than a line": lambda: torch.arange(65).to(torch.uint8),
    "across two lines": lambda: torch.arange(100).to(torch.uint8)[60:68],
    "behind an odd byte": lambda: torch.arange(1025).to(torch.uint8)[1:],
    "as long as is read whole": lambda: noise(256),
    "longer than is read whole": lambda: noise(257),
    "transposed": lambda: noise(13, 17).t(),
    "transposed behind an odd byte": lambda: torch.arange(222).to(torch.uint8)[1:].view(13, 17).t(),
}


@pytest.mark.parametrize("kind", SHORT)
def test_a_write_to_any_byte_of_a_short_tensor_is_found(kind: str) -> None:
    """Whether the byte is in one of its cache lines, or beside them."""
    source = SHORT[kind]()
    view = walk_state(lazily(before=noise(3), w=source, same=noise(300)))
    layout = plan_layout(view)
    cut = segments.Segmentation(layout, view, 1 << 20)
    data = memoryview(bytearray(layout.data_bytes))
    for placement in layout.placements:
        data[placement.start : placement.end] = raw(view.sources[placement.index])
    at = next(p for p in layout.placements if p.name == "on.w")
    check = CheckPlan(cut, view).begin(TensorSources(view, cut), {}, 0)
    assert not check.changed_in(data)
    for byte in range(at.start, at.end):
        data[byte] ^= 1
        assert check.changed_in(data) == {at.index}
        data[byte] ^= 1


def test_digests_come_round_to_every_byte() -> None:
    """A save digests few; the next one goes on where it stopped."""
    view = walk_state(lazily(w=(source := noise(3 << 20))))
    layout = plan_layout(view)
    cut = segments.Segmentation(layout, view, 1 << 20)
    plan, sources = CheckPlan(cut, view), TensorSources(view, cut)
    data = memoryview(bytearray(layout.data_bytes))
    for placement in layout.placements:
        data[placement.start : placement.end] = raw(view.sources[placement.index])
    source.data[2_000_000] += 1
    saves = 0
    while not plan.begin(sources, {}, 1 << 20).changed_in(data):
        saves += 1
        assert saves < 12
