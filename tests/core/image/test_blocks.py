"""A tensor of which one rank's image holds several blocks, or none: all images together hold it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from image_help import header_of, make_image

from tierfall.core.image.merge import MergedHeader, merge_headers
from tierfall.core.image.tree import PiecesNode
from tierfall.core.load.build import BlockTarget
from tierfall.core.load.fill import plan_fill
from tierfall.core.load.load import plan_load
from tierfall.core.tensors.dtensor import Branch, LocalBlocks, TensorPiece
from tierfall.core.types.errors import CaptureError, IntegrityError, RestoreError

WHOLE = torch.arange(24.0).view(6, 4)


def rows(start: int, end: int) -> tuple[torch.Tensor, TensorPiece]:
    return WHOLE[start:end].clone(), TensorPiece((6, 4), (start, 0), (end - start, 4))


def states() -> list[dict[str, Any]]:
    """Rank 0 has two blocks of a tensor, rank 1 one, rank 2 none; a list's members lie on different ranks."""
    one, two = torch.full((2,), 1.0), torch.full((3,), 2.0)
    return [
        {
            "m": Branch(w=LocalBlocks((rows(0, 2), rows(5, 6))), n=1),
            "l": [whole(one), LocalBlocks(())],
        },
        {"m": Branch(w=LocalBlocks((rows(2, 5),)), n=1), "l": [LocalBlocks(()), whole(two)]},
        {"m": Branch(w=LocalBlocks(()), n=1), "l": [LocalBlocks(()), LocalBlocks(())]},
    ]


def whole(tensor: torch.Tensor) -> LocalBlocks:
    return LocalBlocks(((tensor, None),))


def merged(images: list[bytes], own: int | None = None) -> MergedHeader:
    headers = {rank: header_of(image) for rank, image in enumerate(images)}
    return merge_headers(headers, what="1@1 of several ranks", own=own)


def read(found: MergedHeader, images: list[bytes], want: BlockTarget) -> None:
    """Bring all blocks of a whole tensor to where it belongs, as reads of rows do."""
    stored = found.header.tensors[want.position]
    target = want.target.view(stored.dtype).view(stored.shape)
    for block in found.blocks[want.position]:
        image = images[block.rank]
        data = torch.frombuffer(bytearray(image), dtype=torch.uint8)[header_of(image).data_start :]
        part = data[block.start : block.end].clone().view(stored.dtype).view(block.lengths)
        target[tuple(slice(a, a + n) for a, n in zip(block.offset, block.lengths, strict=True))] = (
            part
        )


@pytest.mark.parametrize("own", [None, 0, 2])
def test_blocks_of_all_ranks_are_one_tensor(own: int | None) -> None:
    images = [make_image({**state, "rng": None})[0] for state in states()]
    found = merged(images, own)
    assert sorted(t.name for t in found.header.tensors) == ["l.0", "l.1", "m.w"]
    plan = plan_load(found.header)
    for want in plan.targets:
        read(found, images, want)
    plan.finish()
    result = plan.loaded
    assert torch.equal(result["m"]["w"], WHOLE)
    assert result["m"]["n"] == 1
    assert [t.tolist() for t in result["l"]] == [[1, 1], [2, 2, 2]]


def test_one_image_alone_is_reported_to_be_a_part() -> None:
    for state in states():
        header = header_of(make_image({**state, "rng": None})[0])
        assert not header.complete
        with pytest.raises(RestoreError, match="images of other ranks"):
            plan_load(header)
    assert header_of(make_image({"a": whole(WHOLE), "rng": None})[0]).complete


def test_a_tensor_that_no_rank_has_is_named() -> None:
    found = merged([make_image({"a": LocalBlocks(()), "rng": None})[0]] * 2)
    assert dict(found.header.tree.entries)["a"] == PiecesNode(())
    with pytest.raises(RestoreError, match="a: no rank has a block of it"):
        plan_load(found.header)
    with pytest.raises(RestoreError, match="a: "):
        plan_fill({"a": WHOLE.clone(), "rng": None}, found.header)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_a_block_that_is_not_what_its_place_says_is_refused_by_name() -> None:
    wrong = LocalBlocks(((torch.zeros(3, 4), TensorPiece((6, 4), (0, 0), (2, 4))),))
    with pytest.raises(CaptureError, match=r'state\["w"\].*block of shape \(3, 4\)'):
        make_image({"w": wrong})
    twice = LocalBlocks(((torch.zeros(2), None), (torch.zeros(2), None)))
    with pytest.raises(CaptureError, match=r'state\["w"\].*position None'):
        make_image({"w": twice})
    scaled = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8)
    with pytest.raises(CaptureError, match="quantized"):
        make_image({"w": LocalBlocks(((scaled, TensorPiece((4,), (0,), (2,))),))})
    meta = torch.zeros(2, device="meta")
    with pytest.raises(CaptureError, match="meta tensor"):
        make_image({"w": LocalBlocks(((meta, TensorPiece((4,), (0,), (2,))),))})


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'[\\"p\\",[0,1]]', b'[\\"p\\",[0,2]]'),  # of two tensors
        (b'[\\"p\\",[0,1]]', b'[\\"p\\",[0,9]]'),  # not there
        (b'[\\"p\\",[0,1]]', b'[\\"p\\",[0]  ]'),
    ],
)
def test_pieces_that_do_not_belong_together_are_damage(before: bytes, after: bytes) -> None:
    state = {"w": LocalBlocks((rows(0, 2), rows(5, 6))), "x": torch.zeros(3), "rng": None}
    image, _ = make_image(state)
    assert before in image
    assert header_of(image).tensors[2].name == "x"
    with pytest.raises(IntegrityError):
        header_of(image.replace(before, after))
