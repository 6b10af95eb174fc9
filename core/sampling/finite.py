"""NaN and infinities in an image: a sample of each trained parameter is read, once the image is complete.

Trained parameters are those of modules, and bare ones, that require gradients. Masks, histories of extremes, quantized
tensors, moments and memory that nothing has written yet may hold such values in a training that is well, and none of
them is a trained parameter. The sample is taken from the image, by the thread that captures: ``save`` and the steps do
not wait for it. Its places do not change, so that two steps of one training are compared at the same ones.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping

import numpy as np
import torch

from tierfall.core.image.layout import Layout, Placement
from tierfall.core.sampling.lines import SamplePlan
from tierfall.core.sampling.ranges import SampledRange
from tierfall.core.state.view import StateView

LINES = 8
"""Cache lines per parameter: a bad update makes nearly all of it NaN."""
_WORDS_OF_LOSS = frozenset({"loss", "train", "training", "total", "lm", "step", "epoch"})


class FiniteSample:
    """What is sampled of the images of one layout."""

    def __init__(self, layout: Layout, view: StateView) -> None:
        trained = {
            view.parameters[id(parameter)]
            for parameter in view.live_parameters
            if parameter is not None and parameter.requires_grad
        }
        by_dtype: dict[torch.dtype, list[Placement]] = {}
        for placed in layout.placements:
            name, dtype = view.names[placed.index], view.dtypes[placed.index]
            if name in trained and dtype.is_floating_point and dtype.itemsize > 1:
                by_dtype.setdefault(dtype, []).append(placed)
        self._samples = [
            (dtype, [view.names[each.index] for each in placed], _plan(placed))
            for dtype, placed in by_dtype.items()
        ]

    def not_finite_in(self, data: memoryview) -> list[str]:
        """The names of the parameters with NaN or an infinity in the sample of an image's ``data``."""
        found: list[str] = []
        for dtype, names, plan in self._samples:
            with torch.inference_mode(False):
                start = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
                samples = plan.read(array("Q", [start]) * len(names))
                assert samples is not None
                found += [names[number] for number in samples.not_finite(dtype)]
        return found


def _plan(placed: list[Placement]) -> SamplePlan:
    ranges = [
        SampledRange(number, each.start, each.start, each.end - each.start, None)
        for number, each in enumerate(placed)
    ]
    return SamplePlan(ranges, np.full(len(ranges), LINES), anew=False)


def losses_not_finite(metrics: Mapping[str, float]) -> list[str]:
    """The names of the metrics that are a training's loss, and NaN or infinite.

    A name is that of a loss if it has the word ``loss`` and no others than _WORDS_OF_LOSS: ``loss``, ``train/loss``,
    ``lm loss``. One of an evaluation may be NaN as there was none, and a best value begins as an infinity.
    """
    return [
        f"metrics.{name}"
        for name, value in metrics.items()
        if not np.isfinite(value)
        and "loss" in (words := set(re.findall("[a-z]+", name.lower())))
        and words <= _WORDS_OF_LOSS
    ]
