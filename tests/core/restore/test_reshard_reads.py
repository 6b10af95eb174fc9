"""Reading wanted blocks from stored blocks: every element arrives, for any two layouts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.image.header import ImageHeader, StoredTensor
from tierfall.core.image.merge import MergedHeader, TensorBlock
from tierfall.core.image.tree import MapNode
from tierfall.core.load.build import BlockTarget
from tierfall.core.restore.reshard import BlockReads
from tierfall.core.types.errors import RestoreError

Cuts = tuple[tuple[int, ...], ...]


def blocks_of(shape: Sequence[int], cuts: Cuts) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape at places per dimension: offset and lengths of each block."""
    edges = [
        sorted({0, n, *(c % (n + 1) for c in cut)}) for n, cut in zip(shape, cuts, strict=True)
    ]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        (tuple(low for low, _ in box), tuple(high - low for low, high in box))
        for box in itertools.product(*spans)
    ]


def take(tensor: torch.Tensor, offset: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dimension, (start, length) in enumerate(zip(offset, lengths, strict=True)):
        tensor = tensor.narrow(dimension, start, length)
    return tensor.contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


class Images:
    """What each rank's image holds, behind some bytes that are not wanted."""

    def __init__(self, whole: torch.Tensor, cuts: Cuts) -> None:
        self.data: list[torch.Tensor] = []
        blocks = []
        for rank, (offset, lengths) in enumerate(blocks_of(whole.shape, cuts)):
            part = flat(take(whole, offset, lengths))
            before = 8 * (rank % 3)
            self.data.append(torch.cat([torch.zeros(before, dtype=torch.uint8), part]))
            blocks.append(
                TensorBlock(
                    rank=rank,
                    start=before,
                    end=before + part.numel(),
                    offset=offset,
                    lengths=lengths,
                )
            )
        self.merged = merged_of(whole, tuple(blocks))

    def read(self, reads: BlockReads) -> int:
        """Do what a restore does, and return how many bytes were read."""
        count = 0
        for rank, fills in reads.fills.items():
            assert all(a.end <= b.start for a, b in itertools.pairwise(fills))
            for fill in fills:
                count += fill.end - fill.start
                for target in fill.targets:
                    assert target.numel() == fill.end - fill.start
                    target.copy_(self.data[rank][fill.start : fill.end])
        reads.finish()
        return count


def merged_of(
    whole: torch.Tensor,
    blocks: tuple[TensorBlock, ...],
    replicas: tuple[tuple[TensorBlock, ...], ...] = (),
) -> MergedHeader:
    stored = StoredTensor("w", whole.dtype, tuple(whole.shape), 0, whole.nbytes)
    header = ImageHeader(
        what="test",
        data_start=0,
        data_bytes=whole.nbytes,
        tensors=(stored,),
        tree=MapNode("dict", ()),
        values=(),
        merged=True,
    )
    return MergedHeader(header=header, blocks=(blocks,), replicas={0: replicas} if replicas else {})


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 6), max_size=2).map(tuple)


@settings(max_examples=40, deadline=None)
@given(shape=shapes, stored=st.tuples(cuts, cuts, cuts), wanted=st.tuples(cuts, cuts, cuts))
def test_every_cut_goes_into_every_other(shape: list[int], stored: Cuts, wanted: Cuts) -> None:
    count = torch.Size(shape).numel()
    whole = torch.arange(count, dtype=torch.int32).view(shape)
    images = Images(whole, stored[: len(shape)])
    for offset, lengths in blocks_of(shape, wanted[: len(shape)]):
        target = torch.full(lengths, -1, dtype=torch.int32)
        want = BlockTarget(position=0, target=flat(target), offset=offset, lengths=lengths)
        images.read(BlockReads(images.merged, [want]))
        assert torch.equal(target, take(whole, offset, lengths))


@pytest.mark.parametrize("known", [True, False])
def test_replicas_are_compared_unless_they_are_known_to_be_equal(known: bool) -> None:
    whole = torch.arange(6, dtype=torch.int64)
    first, second = (
        TensorBlock(rank=rank, start=0, end=whole.nbytes, offset=(0,), lengths=(6,))
        for rank in (0, 1)
    )
    images = Images(whole, ((),))
    images.merged = merged_of(whole, (first,), ((second,),))
    images.data.append(flat(whole.clone()))
    same = [(second,)] if known else []
    target = torch.empty(6, dtype=torch.int64)
    want = BlockTarget(position=0, target=flat(target))
    read = images.read(BlockReads(images.merged, [want], same=same))
    assert read == whole.nbytes * (1 if known else 2)
    assert torch.equal(target, whole)
    if not known:
        images.data[1][3] ^= 1
        own = r"w is a tensor of its own on ranks 0, 1, and they differ: .*on_resize=.*skip="
        with pytest.raises(RestoreError, match=own):
            images.read(BlockReads(images.merged, [want]))


def test_blocks_that_differ_come_with_advice_that_helps() -> None:
    """``on_resize`` gives one rank's entry to others, and no rank has the whole."""
    whole = torch.arange(6, dtype=torch.int64)
    images = Images(whole, ((3,),))
    first, second = images.merged.blocks[0]
    copy = TensorBlock(rank=2, start=0, end=24, offset=second.offset, lengths=second.lengths)
    images.merged = merged_of(whole, (first, second), ((copy,),))
    images.data.append(flat(whole[3:].clone()))
    want = BlockTarget(position=0, target=flat(torch.empty(6, dtype=torch.int64)))
    images.read(BlockReads(images.merged, [want]))
    images.data[2][3] ^= 1
    with pytest.raises(
        RestoreError, match=r"differ: the ranks that saved it .* same blocks; skip="
    ):
        images.read(BlockReads(images.merged, [want]))
