"""Capture mode: whether a save that may be lazy is to be lazy, by what either has cost this run.

Pure. What a save costs is told by the time from it to the next, over as many steps: that has in it whatever background
copies take from the training, and whatever the training waits for.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

TRIALS = 3
REMEMBERED = 9
AGAIN_AFTER = 100
"""After so many saves in a row of one kind the other is tried again: machines change."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One save, and the seconds and training steps from it to the next."""

    lazy: bool
    steps: int
    seconds: float


def choose_lazy(trials: Sequence[Trial]) -> tuple[bool, str]:
    """Say whether the next save is to be captured lazily, and why.

    ``trials`` are in the order of the saves. Those over another number of steps than the last do not count.
    """
    if not trials:
        return True, "lazy: nothing is known yet"
    alike = [trial for trial in trials if trial.steps == trials[-1].steps]
    lazy, blocking = (
        [trial.seconds for trial in alike if trial.lazy is kind][-REMEMBERED:]
        for kind in (True, False)
    )
    if min(len(lazy), len(blocking)) < TRIALS:
        is_lazy = len(lazy) <= len(blocking)
        return is_lazy, f"{_word(is_lazy)}: {TRIALS} of each are tried"
    gain_s = statistics.median(blocking) - statistics.median(lazy)
    is_lazy = gain_s >= 0
    if all(trial.lazy is is_lazy for trial in alike[-AGAIN_AFTER:]) and len(alike) >= AGAIN_AFTER:
        return not is_lazy, f"{_word(not is_lazy)}: it is tried again"
    return (
        is_lazy,
        f"{_word(is_lazy)}: from save to save the run takes {abs(gain_s):.3g} s less than {_word(not is_lazy)}",
    )


def _word(is_lazy: bool) -> str:
    return "lazy" if is_lazy else "blocking"
