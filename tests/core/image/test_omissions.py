"""The warnings of a first save about state that a resume would miss."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from tierfall.core.state.item import item
from tierfall.core.state.omissions import omissions


@pytest.fixture(autouse=True)
def no_other_loaders() -> None:
    """Those of other tests that nobody has collected yet are loaders of this process, too."""
    gc.collect()


class Counting:
    """Any object with a state_dict."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class Loader(DataLoader[Any], Counting):
    """As StatefulDataLoader is one."""

    def __init__(self, **options: Any) -> None:
        DataLoader.__init__(self, [1, 2, 3], **options)


class ByEpoch(RandomSampler):
    """Seeded by the epoch, as DistributedSampler and accelerate's SeedableRandomSampler."""

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1, 2, 3])


def texts(state: dict[str, Any]) -> list[str]:
    return [text for text in omissions(state) if "shuffles" in text]


def trained() -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "extra": {"epoch": 1, "lists": [[1], (2.0, "x")], 5: None},
        "scalar": torch.zeros(3),
        "mean": Counting(shadow=[torch.zeros(2)]),
    }


def test_a_loader_that_does_not_shuffle_by_the_random_state_is_not_missed() -> None:
    loaders = [
        DataLoader([1, 2, 3]),
        DataLoader(Stream()),
        DataLoader([1, 2, 3], sampler=ByEpoch([1, 2, 3])),
        DataLoader([1, 2, 3], batch_sampler=BatchSampler(ByEpoch([1, 2, 3]), 2, False)),
    ]
    assert texts(trained()) == []
    del loaders


def test_what_may_hold_the_order_is_enough() -> None:
    loader = DataLoader([1, 2, 3], shuffle=True)
    assert texts(trained())
    for held in (
        torch.Generator(),
        item(torch.Generator()),
        {"deep": [(torch.Generator(),)]},
        torch.Generator().get_state(),
        Loader(shuffle=False),
        Counting(source=torch.Generator()),
        Counting(loader=Loader(shuffle=False)),
        Counting(sampler=RandomSampler([1, 2])),
    ):
        assert texts({**trained(), "data": held}) == [], held
    del loader


def test_the_generator_that_a_loader_draws_from_is_not_enough() -> None:
    """Its state after some batches of an epoch does not lead back into the epoch."""
    generator, at_epoch_start = torch.Generator(), torch.Generator()
    loader = DataLoader([1, 2, 3], shuffle=True, generator=generator)
    assert texts({**trained(), "generator": generator})
    assert texts({**trained(), "generator": at_epoch_start}) == []
    del loader
