"""The failure domain of this node, such as its rack: from a variable, a file of labels, or Slurm's topology."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from tierfall.core.types.errors import ConfigError

VARIABLE = "TIERFALL_DOMAIN"
_ADDRESS, _PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
_EXPECTED = "expected lines 'HOSTNAME DOMAIN', and comments after '#'"


class NodeDomain(NamedTuple):
    """The name of a failure domain, and where it is from; both empty where it is not known."""

    name: str = ""
    source: str = ""


def node_name() -> str:
    """Return the name of this machine: Slurm's name of the node, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def find_domain(labels: Path | None) -> NodeDomain:
    """Return the failure domain of this node: from the variable, or ``labels``, or Slurm's topology, the first that is
    there. Raises ConfigError where ``labels`` cannot be read, is malformed, or lacks this node."""
    if name := os.environ.get(VARIABLE, "").strip():
        return NodeDomain(name, VARIABLE)
    if labels is not None:
        return NodeDomain(_labelled(labels, node_name()), "domains")
    name = _switch(os.environ.get(_ADDRESS, ""), os.environ.get(_PATTERN, ""))
    return NodeDomain(name, _ADDRESS) if name else NodeDomain()


def _labelled(path: Path, node: str) -> str:
    known = _read_labels(path)
    for name in (node, node.partition(".")[0]):
        if name in known:
            return known[name]
    raise ConfigError(f"{path}: has no line for this node, {node}; {_EXPECTED}, one for each node")


def _read_labels(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; {_EXPECTED}") from error
    known: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise ConfigError(f"{path}: line {number} has {len(words)} words; {_EXPECTED}")
        node, domain = words
        if known.setdefault(node, domain) != domain:
            raise ConfigError(
                f"{path}: line {number}: {node} is in {domain}, and in {known[node]} before; expected one domain for "
                "each node"
            )
    return known


def _switch(address: str, pattern: str) -> str:
    """Return the switch that a node is connected to: of s0.s4.tux1 by switch.switch.node, that is s4. Empty where
    there is none."""
    kinds = pattern.split(".")
    parts = address.split(".", len(kinds) - 1)  # the name of a node may have dots
    is_below = len(kinds) == len(parts) >= 2 and kinds[-1] == "node"
    return parts[-2] if is_below else ""
