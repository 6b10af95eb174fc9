"""The arguments of ``save``: metrics and tags, checked before anything is written, and what their records take."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tierfall.core.format.records import Lineage, chunk_count, records_bytes_max
from tierfall.core.image.layout import Layout
from tierfall.core.types.errors import CaptureError, ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.text import are_texts, with_article


def checked_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics as floats; raise CaptureError for what is not a number.

    A tensor on a device is returned detached: the capture reads it in the order of the device's work.
    """
    if not isinstance(metrics, Mapping):
        raise CaptureError(
            f"save: metrics is {with_article(type(metrics).__name__)}, expected a mapping of names to numbers"
        )
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise CaptureError(f"save: metrics: a name is {name!r}, expected a string")
        dims = getattr(value, "ndim", 0)
        if dims or isinstance(value, str | bytes) or not hasattr(value, "__float__"):
            kind = f"{with_article(type(value).__name__)}{f' of {dims} dimensions' if dims else ''}"
            raise CaptureError(
                f"save: metrics[{name!r}] is {kind}, expected a number or a 0-dim tensor"
            )
    return {name: _read_metric(name, value) for name, value in metrics.items()}


def _read_metric(name: str, value: Any) -> Any:
    """Return a metric's present value: the loop may change it after save."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        if not (value.is_cpu or value.is_meta or value.is_complex()):
            return value
    try:
        read = float(value)
        if math.isinf(read) and value != read:  # float() of a large Decimal raises nothing
            raise OverflowError(f"it is larger than {sys.float_info.max:.2g}")
        return read
    except OverflowError as error:
        raise CaptureError(
            f"save: metrics[{name!r}] is too large for a 64-bit float, as metrics are stored ({error}): give it in a "
            "larger unit, or put it into the state. Nothing of this step was saved: save it again without that metric"
        ) from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise CaptureError(
            f"save: metrics[{name!r}] cannot be read as a number: {error}"
        ) from error


def checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Return tags as a tuple; raise ConfigError unless they are a list of valid names."""
    if isinstance(tags, str) or not are_texts(tags):
        raise ConfigError(f"save: tags must be a list of names, such as ['best'], not {tags!r}")
    return tuple(check_name(tag, what="save: tags") for tag in tags)


def records_bytes(
    layout: Layout,
    chunk_bytes: int,
    metrics: Mapping[str, Any],
    tags: Sequence[str],
    line: Lineage,
) -> int:
    """Return an upper bound of the bytes of an image's manifest and commit record together."""
    return records_bytes_max(
        pieces_bytes=len(layout.pieces),
        chunks=chunk_count(layout.image_bytes, layout.data_start, chunk_bytes),
        metrics=metrics,
        tags=tags,
        run=line.run,
    )
