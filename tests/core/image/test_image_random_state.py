"""The random state of the process is part of every image, unless the state has an entry ``rng`` of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from image_help import make_image, restore

from tierfall.core.state.walk import walk_state
from tierfall.core.types.errors import CaptureError, RestoreError


@pytest.fixture(autouse=True)
def keep_random_state():
    saved = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


def test_generators_of_ones_own_are_saved_as_the_documentation_says() -> None:
    python, numpy, of_torch = random.Random(3), np.random.default_rng(3), torch.Generator()
    for mine in (python, numpy, np.random.RandomState(3)):
        with pytest.raises(CaptureError, match="it is a "):
            walk_state({"generator": mine})

    def told() -> dict[str, object]:
        return {
            "python": python.getstate(),
            "numpy": numpy.bit_generator.state,
            "torch": of_torch,
        }

    def three() -> tuple[float, ...]:
        return python.random(), numpy.random(), torch.rand(1, generator=of_torch).item()

    image, _ = make_image({"mine": told()})
    expected = three()
    state = {"mine": told()}
    restore(state, image)
    python.setstate(state["mine"]["python"])
    numpy.bit_generator.state = state["mine"]["numpy"]
    assert three() == expected


def test_state_that_does_not_fit_is_an_error_of_ours() -> None:
    from tierfall.core.tensors import rng

    good = rng.capture()
    for bad in (
        {**good, "torch": torch.zeros(3, dtype=torch.uint8)},
        {**good, "python": {}},
        {**good, "numpy": {"bit_generator": "Nope"}},
        5,
    ):
        with pytest.raises(RestoreError, match="random state"):
            rng.apply(bad)
