"""The result of a state's walk: its tensors, its encoded values, and the tree of containers.

A node of the tree is an int or a tuple, and contains no value that may change: those are in ``values``. So two walks of
one structure give equal trees, which are cheap to compare.

    7                                   tensor number 7 of the view
    ("v", 3, 8, 9)                      value number 3, whose blobs are the tensors 8 and 9
    ("d", kind, keys, nodes)            a mapping with tensors in it; a key is str, or (coded,) for any other type
    ("l", nodes), ("t", nodes)          a list, a tuple
    ("m", keys, names, nodes)           a module's state_dict; names is () if they equal the keys
    ("o", names, groups, state)         a stock optimizer: per parameter its name or None, per group numbers and node
    ("s", node)                         an object with state_dict and load_state_dict
    ("q", number, scheme, axis, node)   a quantized tensor's integers, and a node for its scale and zero point
    ("w", class, attributes, nodes)     a wrapper (core.tensors.wrappers): its inner tensors, and the value of its shape
    ("c", name, node)                   a value of a registered type, encoded as something with tensors in it
    ("r", node)                         the random state of the process
    ("p", (7, 8))                       a tensor of which this rank holds no block, or several
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierfall.core.state.item import OnResize
from tierfall.core.tensors.dtensor import TensorPiece
from tierfall.core.tensors.names import Trail
from tierfall.core.tensors.value_codec import Coded
from tierfall.core.types.values import Changes

Node = Any  # int, or one of the tuples above

NO_OWNER = -1
"""Owner of a tensor that no optimizer's step is known to change."""
DECLARED = 0
"""Owner of a tensor that the user wrapped in ``item(..., changes=...)``."""
UNSHARED = -2
"""Owner of a tensor that a state_dict hook created and only the view references: nothing can change it."""
IN_OPTIMIZER = -3
"""Owner of a plain tensor in the memory of an optimizer that stepped since the last save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """A state at one moment: its tensors (aliases resolved) and its encoded values.

    Columns by tensor number: the detached tensors (``sources``), their addresses (``pointers``), when each may change,
    whose step changes it (``owners``: the id of a parameter, for the parameter and its optimizer state; DECLARED;
    UNSHARED; IN_OPTIMIZER; NO_OWNER), its trail, whether its memory equals its bytes in the image (``plain``), its
    strides if it is dense but not contiguous, and its position in a sharded tensor (``block_positions``).

    ``parameters`` maps the ids of all parameters, of modules and bare, to their names; ``live_parameters`` has them,
    and None. ``rules`` are the ``on_resize`` rules by name, without defaults. ``types`` are the classes of optimizers
    and other objects with a state_dict, by name. ``structure`` has everything that a layout depends on: equal
    structures have equal layouts.
    """

    names: tuple[str, ...]
    sources: list[torch.Tensor]
    pointers: array[int]
    changes: tuple[Changes, ...]
    owners: tuple[int, ...]
    trails: tuple[Trail, ...]
    plain: tuple[bool, ...]
    strides: tuple[tuple[int, ...] | None, ...]
    parameters: Mapping[int, str]
    live_parameters: Sequence[nn.Parameter | None] = ()
    optimizers: tuple[Optimizer, ...]
    tree: Node
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    block_positions: tuple[TensorPiece | None, ...]
    values: list[Coded]
    rules: Mapping[str, OnResize]
    types: Mapping[str, str]
    structure: tuple[Any, ...]

    def tensor(self, number: int) -> torch.Tensor:
        """Return a tensor by its number."""
        return self.sources[number]
