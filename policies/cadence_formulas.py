"""The formulas of how often to checkpoint, as their papers have them. Pure; times are in seconds.

``cost_s`` is what a checkpoint keeps the training from, ``mtbf_s`` the mean time between failures.
"""

from __future__ import annotations

import math

_SLACK = 1e-9
"""What rounding of a quotient may add: 3.0000000000000004 steps are 3."""


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval to first order, sqrt(2 C M) (Young 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval to higher order: sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)) - C where C < 2 M,
    else M (Daly 2006)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def availability_s(cost_s: float, mtbf_s: float, restore_s: float) -> float:
    """Return the time from checkpoint to checkpoint, its own included, with which most of the time is training:
    T_s + sqrt(2 (T_f + T_r) T_s + T_s^2) (arXiv 2410.18124)."""
    return cost_s + math.sqrt(2 * (mtbf_s + restore_s) * cost_s + cost_s**2)


def checkfreq_steps(full_s: float, foreground_s: float, step_s: float) -> int:
    """Return the steps from one checkpoint to the next with which one is through before the next begins:
    max(ceil((T_full - o) / T_iter), 1) (CheckFreq, FAST'21)."""
    return max(_ceil((full_s - foreground_s) / step_s), 1)


def overhead_steps(cost_s: float, step_s: float, overhead: float) -> int:
    """Return the fewest steps over which what a save adds is within ``overhead``, a share of the time without it: what
    CheckFreq's growing of its interval by 2 arrives at, at once, and on the way down too."""
    return max(_ceil(cost_s / (overhead * step_s)), 1)


def pccheck_steps(write_s: float, images: int, slowdown: float, step_s: float) -> int:
    """Return the fewest steps between checkpoints with which ``images`` of them in flight keep up:
    f >= T_w / (N q t), q the slow-down of training that is tolerated, 1 for none (PCcheck, ASPLOS'25)."""
    return max(_ceil(write_s / (images * slowdown * step_s)), 1)


def expected_ettr(
    nodes: int, failures_per_node_day: float, *, restart_s: float, interval_s: float, write_s: float
) -> float:
    """Return the share of its time in which a run is expected to make progress that is kept:
    (1 - N r_f (u0 + dt/2)) / (1 + w/dt) ("Revisiting Reliability", HPCA'25). ``write_s`` blocks; nodes have 8 GPUs
    there."""
    failures_per_s = nodes * failures_per_node_day / 86400
    return (1 - failures_per_s * (restart_s + interval_s / 2)) / (1 + write_s / interval_s)


def best_ettr_interval_s(nodes: int, failures_per_node_day: float, write_s: float) -> float:
    """Return the interval with which that share is highest: sqrt(2 w / (N r_f)) (as above)."""
    return math.sqrt(2 * write_s * 86400 / (nodes * failures_per_node_day))


def _ceil(value: float) -> int:
    return math.ceil(value - _SLACK * max(1.0, abs(value)))
