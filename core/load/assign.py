"""Assigning a plain value to the state: in place, where the state holds a list, dict, set, array or generator.

References that the program holds to such an object see the restored value.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from typing import Any

import torch

from tierfall.core.tensors import numpy_values
from tierfall.core.types.errors import RestoreError


def merge(target: Any, source: Any) -> Any:
    """Make ``target`` equal to ``source``, in place where possible, and return the object to store in the state."""
    if isinstance(target, torch.Generator):
        return _set_generator(target, source)
    if type(target) is not type(source):
        return source
    if type(source) in (dict, OrderedDict, Counter):
        items = {k: merge(target[k], v) if k in target else v for k, v in source.items()}
        target.clear()
        for key, value in items.items():
            target[key] = value
        return target
    if type(source) is list:
        kept = [merge(t, s) for t, s in zip(target, source, strict=False)]
        target[:] = kept + source[len(kept) :]
        return target
    if type(source) is tuple and len(source) == len(target):
        merged = tuple(map(merge, target, source))
        return target if all(map(operator.is_, merged, target)) else merged
    if type(source) is set:
        target.clear()
        target.update(source)
        return target
    return target if numpy_values.refill(target, source) else source


def _set_generator(target: torch.Generator, source: Any) -> Any:
    if isinstance(source, torch.Generator):
        if source.device.type != target.device.type:
            return source
        source = source.get_state()
    elif not isinstance(source, torch.Tensor):
        return source
    try:
        target.set_state(source)
    except RuntimeError as error:
        raise RestoreError(
            f"restore: the saved generator does not fit the one on {target.device}: {error}"
        ) from error
    return target
