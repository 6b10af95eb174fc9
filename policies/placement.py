"""Which nodes keep copies of a node's images in their memory, and which losses of nodes these survive.

An image has ``copies`` + 1 holders: its own node and those that keep a copy. It is lost when all its holders are. The
fewer different sets of holders there are, the fewer losses of several nodes cost something, so that nodes form groups
whose members keep each other's images (Gemini, SOSP 2023). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, nextafter

from tierfall.core.types.view import NodeLosses, SurvivalChance

CHANCES_BEYOND = 3
"""Chances are computed for so many losses more than an image has copies on other nodes."""


@dataclass(frozen=True)
class CopyPlacement:
    """``holders``: of each node, in their order, the nodes that have its images: itself first. ``crowded``: those
    nodes whose holders share a failure domain, since there are too few domains, or one is too large."""

    holders: tuple[tuple[int, ...], ...]
    crowded: tuple[int, ...]

    @property
    def copies(self) -> int:
        return len(self.holders[0]) - 1

    @property
    def node_losses(self) -> NodeLosses:
        """The chances that what is saved by this placement survives; each is computed anew."""
        others = CopyPlacement(holders=tuple(nodes[1:] for nodes in self.holders), crowded=())
        return NodeLosses(whole=self._chances(), copies=others._chances())

    def _chances(self) -> tuple[SurvivalChance, ...]:
        """Return the chances of the loss of 1, 2 and so on nodes."""
        found = []
        for losses in range(1, min(self.copies + CHANCES_BEYOND, len(self.holders)) + 1):
            probability, exact = self.survival(losses)
            if losses > self.copies:  # a loss that is possible is never rounded away
                probability = min(probability, nextafter(1.0, 0.0))
            found.append(SurvivalChance(losses=losses, probability=probability, exact=exact))
        return tuple(found)

    def survival(self, losses: int) -> tuple[float, bool]:
        """Return the probability that every image has a holder left after the loss of so many nodes, any with the same
        chance; and whether that is exact, or a lower bound.

        Exact if the sets of holders are disjoint. Otherwise the bound counts a loss once for each set that it contains.
        """
        nodes, width = len(self.holders), len(self.holders[0])
        if losses < width:
            return 1.0, True
        if losses >= nodes:
            return 0.0, True
        sets = len({frozenset(holders) for holders in self.holders})
        is_disjoint = sets * width == nodes
        most = losses // width if is_disjoint else 1
        survived = (
            sum(  # losses without those that contain a set, with those that contain two, and so on
                (-1) ** count
                * comb(sets, count)
                * comb(nodes - count * width, losses - count * width)
                for count in range(most + 1)
            )
        )
        return max(0.0, survived / comb(nodes, losses)), is_disjoint


def place_copies(domains: Sequence[str], copies: int) -> CopyPlacement:
    """Place ``copies`` copies of each node's images on other nodes. ``domains`` has the failure domain of each node.

    Every node keeps the images of ``copies`` others. No two holders of an image share a domain, unless a domain has
    more than 1 / (copies + 1) of the nodes: then none can be placed so for all. Raises ValueError where ``copies`` is
    not between 1 and the number of nodes less one.
    """
    nodes, width = len(domains), copies + 1
    if not 1 <= copies < nodes:
        raise ValueError(
            f"{copies} copies on other nodes, and {nodes} nodes; expected 1 to {nodes - 1} copies"
        )
    sizes = Counter(domains)
    order = sorted(range(nodes), key=lambda node: (-sizes[domains[node]], domains[node], node))
    groups = nodes // width
    if nodes % width == 0:
        rings = [order[first::groups] for first in range(groups)]
    elif len(sizes) >= width + nodes % width and max(sizes.values()) <= groups:
        rings = _mixed(order, domains, width)
    else:
        return _placement(_stride(order, width, groups), domains)
    holders: list[tuple[int, ...]] = [()] * nodes
    for ring in rings:
        for at, node in enumerate(ring):
            holders[node] = tuple(ring[(at + step) % len(ring)] for step in range(width))
    return _placement(holders, domains)


def _mixed(order: list[int], domains: Sequence[str], width: int) -> list[list[int]]:
    """Return groups of ``width`` nodes, and a ring of those that are left over with one more group. The ring has a
    node of each of the largest domains: then no other domain has more nodes than there are groups."""
    left_over = width + len(order) % width
    ring: dict[str, int] = {}
    for node in order:
        if len(ring) < left_over:
            ring.setdefault(domains[node], node)
    others = [node for node in order if ring.get(domains[node]) != node]
    groups = len(others) // width
    return [list(ring.values()), *(others[first::groups] for first in range(groups))]


def _stride(order: list[int], width: int, stride: int) -> list[tuple[int, ...]]:
    """Return the holders of each node, ``stride`` apart in the order of domains: no domain is longer, if that is
    possible."""
    holders: list[tuple[int, ...]] = [()] * len(order)
    for at, node in enumerate(order):
        holders[node] = tuple(order[(at + step * stride) % len(order)] for step in range(width))
    return holders


def _placement(holders: Sequence[tuple[int, ...]], domains: Sequence[str]) -> CopyPlacement:
    crowded = [
        owner
        for owner, nodes in enumerate(holders)
        if len({domains[node] for node in nodes}) < len(nodes)
    ]
    return CopyPlacement(holders=tuple(holders), crowded=tuple(crowded))
