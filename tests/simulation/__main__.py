"""Weeks of training on a virtual clock: ``python -m tests.simulation``, or ``make simulate``.

Each seed is a run of so many hours; one that breaks a promise is told with what happened, and how to see it again.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from tests.simulation.hour import HOUR_S, run_hour
from tests.simulation.many_hour import run_many_hour
from tests.simulation.peer_hour import run_peer_hour

Run = Callable[..., object]


def live_through(run: Run, seed: int, options: dict[str, Any]) -> str | None:
    """Return what is wrong with a seed's life, if anything."""
    logging.disable(logging.CRITICAL)
    try:
        run(seed, **options)
    except AssertionError as error:
        return str(error)
    return None


def runs(chosen: argparse.Namespace) -> list[tuple[Run, dict[str, Any]]]:
    """Return what is run for each seed, with its options."""
    seconds = chosen.hours * HOUR_S
    if chosen.peers:
        options = {"seconds": seconds, "nodes": chosen.nodes}
        return [(run_peer_hour, {**options, "copies": copies}) for copies in chosen.copies]
    alone: list[tuple[Run, dict[str, Any]]] = [(run_hour, {"seconds": seconds})]
    ranks = [(run_many_hour, {"seconds": seconds, "storage": chosen.storage})]
    return [
        *(alone if not (chosen.ranks or chosen.storage) else ()),
        *(ranks if not chosen.alone else ()),
    ]


def main() -> int:
    """Return 1 where a seed broke a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1000, help="how many runs of each kind")
    parser.add_argument("--hours", type=float, default=1.0, help="how long each of them is")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--ranks", action="store_true", help="only runs of several ranks")
    kinds.add_argument("--alone", action="store_true", help="only runs of one rank")
    kinds.add_argument(
        "--storage",
        action="store_true",
        help="only runs of several ranks, whose storage fails, too",
    )
    kinds.add_argument(
        "--peers", action="store_true", help="only runs that keep images in other nodes' memory"
    )
    parser.add_argument("--nodes", type=int, help="with --peers: how many; absent: by the seed")
    parser.add_argument(
        "--copies", type=int, nargs="+", default=[1], help="with --peers: runs with so many copies"
    )
    chosen = parser.parse_args()
    began, broken = time.monotonic(), 0
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        lives = {
            pool.submit(live_through, run, seed, options): seed
            for seed in range(chosen.first, chosen.first + chosen.seeds)
            for run, options in runs(chosen)
        }
        for life in as_completed(lives):
            if (wrong := life.result()) is not None:
                broken += 1
                print(wrong, flush=True)
    seconds = time.monotonic() - began
    lived = len(lives) * chosen.hours / 24 / 7
    print(
        f"{len(lives)} runs, {lived:.1f} weeks of training in {seconds:.0f} s: {broken} broke a promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
