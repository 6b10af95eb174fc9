"""How often a copy is tried that can never be written, by what a run's log or trace says of its tasks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

TRIES = 3
MORE = 4
"""A rank may try again until it receives that the copy is set aside."""

_STARTED = re.compile(r"attempt \d+ goes on from ")
_ARRIVED = re.compile(r"CommitCopy \S+ on (\w+): done|announced: \('committed', \d+, \d+, '(\w+)'")
_TRIED = re.compile(r"((?:rank \d+: )?)OpenShard (\S+) on (\w+): (.+)")


def check_tries(lines: Iterable[str]) -> None:
    """A copy that has been refused ``TRIES`` times, and again once its tier took another one, is set aside: no start
    tries it for ever."""
    refused: Counter[tuple[str, str, str]] = Counter()
    again: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        if _STARTED.match(line):
            refused.clear()
            again.clear()
        elif arrived := _ARRIVED.match(line):
            tier = arrived[1] or arrived[2]
            again.update(
                {copy: 0 for copy in refused if copy[2] == tier and refused[copy] >= TRIES}
            )
        elif tried := _TRIED.match(line):
            copy = (tried[1], tried[2], tried[3])
            if not tried[4].endswith(": not here"):
                del refused[copy], again[copy]
                continue
            refused[copy] += 1
            if copy in again:
                again[copy] += 1
                assert again[copy] <= MORE, f"{tried[1]}{tried[2]} is tried on {tried[3]} for ever"
