"""What a state is called in a checkpoint of ``torch.distributed.checkpoint``.

An optimizer's state stands under the names of its parameters, as ``get_optimizer_state_dict`` names them.
"""

from __future__ import annotations

from typing import Any

from tierfall.core.image.tree import MapNode, ModuleNode, OptimizerNode


def by_parameter(node: OptimizerNode, built: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return an optimizer's state by the names of its parameters, less ``prefix``; by their numbers where it does not
    know them."""
    if None in node.names:
        return built
    names = [str(name).removeprefix(prefix) for name in node.names]
    state = {names[k] if isinstance(k, int) else k: v for k, v in built["state"].items()}
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in built["param_groups"]
    ]
    return {**built, "state": state, "param_groups": groups}


def prefix_of(node: OptimizerNode, tree: MapNode) -> str:
    """Return what stands before the names of an optimizer's parameters: the name of the one module that has them."""
    for key, child in tree.entries:
        prefix = f"{key}."
        if isinstance(child, ModuleNode) and all(str(n).startswith(prefix) for n in node.names):
            return prefix
    return ""


def as_state(built: Any, name: str) -> dict[str, Any]:
    """Return what was built as a state_dict; a part that is none comes to stand under the last of its names."""
    return built if isinstance(built, dict) else {name.rpartition(".")[2]: built}
