"""Loading an image as a nested dict: what each ``state_dict()`` returned at the save."""

from __future__ import annotations

import logging
from typing import Any

import torch

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import MapNode, ModuleNode, Node, positions_of
from tierfall.core.load.build import CPU, Builder, Lend
from tierfall.core.load.choices import Choices, check_names
from tierfall.core.load.plan import ReadPlan
from tierfall.core.tensors.builtin_codecs import UnknownValue
from tierfall.core.types.errors import ConfigError, RestoreError

logger = logging.getLogger("tierfall")


class _LenientBuilder(Builder):
    """Builds what a process has the classes for; an ``UnknownValue`` stands for any other value."""

    def __init__(self, header: ImageHeader, lend: Lend | None) -> None:
        super().__init__(header, lend)
        self.reasons: dict[str, str] = {}
        """Why there is an UnknownValue, by the name of its class or codec."""

    def unknown(self, value: UnknownValue) -> object:
        self.reasons[value.name] = value.reason
        return value


def check_device(map_location: str | torch.device) -> None:
    """Raise ConfigError, before anything is read, where tensors cannot be made on a device."""
    what = f"load: map_location={map_location!r} is not a device that can be used here"
    if not isinstance(map_location, str | torch.device):
        raise ConfigError(f"{what}: expected one such as 'cpu' or 'cuda:0'")
    try:
        torch.empty(0, device=map_location)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{what}: {str(error).splitlines()[0][:200]}") from error


def plan_load(
    header: ImageHeader,
    *,
    map_location: str | torch.device | None = None,
    choices: Choices | None = None,
    whole: bool = False,
    lend: Lend | None = None,
) -> ReadPlan:
    """Plan to load an image, or what ``choices`` select of it, onto ``map_location`` (None: the CPU).

    Allocates every tensor; with ``lend`` those on the CPU are in its memory, and are no targets. A value whose class or
    codec is not there becomes an ``UnknownValue``, which is logged. Raises RestoreError where a tensor is a block, and
    ``whole`` is set: the images of all ranks have to be merged.
    """
    device = CPU if map_location is None else torch.device(map_location)
    tree = header.tree
    if choices is not None and choices.only is not None:
        check_names(header, choices, ())
        selected = _selected(tree, "", choices)
        assert isinstance(selected, MapNode)
        tree = selected
    for stored in [header.tensors[position] for position in positions_of(tree)] if whole else ():
        if stored.shape != stored.whole_shape:
            raise RestoreError(f"load of {header.what}: {stored.name} is a block of a tensor")
    builder = _LenientBuilder(header, lend)
    make = builder.prepare(tree, device)
    loaded: dict[Any, Any] = {}

    def build() -> None:
        loaded.update(make())
        for name, reason in builder.reasons.items():
            logger.warning("load: each value of %s is a tierfall.UnknownValue: %s", name, reason)

    return ReadPlan(targets=tuple(builder.targets), actions=(build,), loaded=loaded)


def _selected(node: Node, name: str, choices: Choices) -> Node:
    """Return a mapping or a module with the selected entries. Of a list, a tuple, an optimizer and an object, all is
    selected as soon as a part is."""
    match node:
        case MapNode():
            below = zip(node.entries, node.named(name), strict=True)
            parts = [
                (key, child if choices.has(inner) else _selected(child, inner, choices))
                for (key, child), (inner, _) in below
                if choices.selects_at_or_below(inner)
            ]
            return MapNode(node.kind, tuple(parts))
        case ModuleNode():
            kept = [e for e in node.entries if choices.selects_at_or_below(f"{name}.{e[1]}")]
            return ModuleNode(tuple(kept))
    return node
