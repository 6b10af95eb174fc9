"""A block of a tensor that is not what its place says is refused when it is saved."""

from __future__ import annotations

import pytest
import torch
from image_help import make_image

from tierfall.core.tensors.dtensor import LocalBlocks, TensorPiece
from tierfall.core.types.errors import CaptureError


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
