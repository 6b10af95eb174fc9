"""The formulas of cadence and of planning, each with its source. Times are in seconds, sizes in bytes, rates in bytes
per second, failure rates in failures per second. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

_SLACK = 1e-9
"""Tolerance for the rounding of a quotient: 3.0000000000000004 steps are 3."""

# The interval between saves --------------------------------------------------------------------------


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval to first order: sqrt(2 C M) (Young 1974). With M the mean time between all failures of a
    job, it is sqrt(2 w / (N r_f)) of Meta (HPCA'25)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval to higher order: sqrt(2 C M) (1 + 1/3 sqrt(C / 2M) + 1/9 (C / 2M)) - C where C < 2 M,
    else M (Daly 2006)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def availability_s(cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return the interval of the highest availability: T_s + sqrt(2 (T_f + T_r) T_s + T_s^2), T_s the cost of a save,
    T_f the time to a failure, T_r the restart (arXiv 2410.18124)."""
    return cost_s + math.sqrt(2 * (mtbf_s + restart_s) * cost_s + cost_s**2)


def best_ettr_s(cost_s: float, lost_share: float, failures_per_s: float) -> float:
    """Return the interval d of the best ``ettr`` = (1 - A - r d / 2) / (1 + w / d): its derivative is 0 at
    sqrt(w^2 + 2 w (1 - A) / r) - w. A is the share of time that failures take at any interval, r their rate, w the cost
    of a save. For small w and A that is Young's."""
    return math.sqrt(cost_s**2 + 2 * cost_s * (1 - lost_share) / failures_per_s) - cost_s


def checkfreq_steps(full_s: float, foreground_s: float, step_s: float) -> int:
    """Return the steps from one checkpoint to the next with which one is through before the next begins:
    max(ceil((T_full - o) / T_iter), 1) (CheckFreq, FAST'21)."""
    return max(_ceil((full_s - foreground_s) / step_s), 1)


def overhead_steps(cost_s: float, step_s: float, overhead: float) -> int:
    """Return the fewest steps over which a save's cost is within ``overhead``, a share of the time without it.
    CheckFreq grows its interval by 2 towards it; here it is immediate, and from above too."""
    return max(_ceil(cost_s / (overhead * step_s)), 1)


def pccheck_steps(write_s: float, images: int, slowdown: float, step_s: float) -> int:
    """Return the fewest steps between checkpoints with which ``images`` of them in flight keep up:
    f >= T_w / (N q t), q the slow-down of training that is tolerated, 1 for none (PCcheck, ASPLOS'25)."""
    return max(_ceil(write_s / (images * slowdown * step_s)), 1)


def _ceil(value: float) -> int:
    return math.ceil(value - _SLACK * max(1.0, abs(value)))


# What a save and a failure cost ----------------------------------------------------------------------


def lazy_hold_s(
    image_bytes: float, copy_bytes_per_s: float, window_s: float, drain_s: float, every_s: float
) -> float:
    """Return how long a lazy save holds the training: the copy to host memory beyond the forward and backward passes
    that it runs beside, and, as an image leaves memory every ``drain_s``, the wait for room if one comes every
    ``every_s`` (DataStates-LLM, HPDC'24)."""
    return max(0.0, image_bytes / copy_bytes_per_s - window_s) + max(0.0, drain_s - every_s)


def wasted_s(durable_s: float, every_s: float, retrieve_s: float) -> float:
    """Return the training time that a failure costs on average: T_ckpt + 1/(2f) + T_retrieve. ``durable_s``: until a
    checkpoint counts; ``every_s``: 1/f, between two of them; ``retrieve_s``: to read one (Gemini, SOSP'23)."""
    return durable_s + every_s / 2 + retrieve_s


def ettr(cost_s: float, every_s: float, losses: Iterable[tuple[float, float]]) -> float:
    """Return the effective training time ratio: (1 - N r_f (u0 + dt/2)) / (1 + w/dt), w what a save costs, dt the
    interval (Meta, HPCA'25, arXiv 2410.21680). ``losses`` has a pair for each kind of failure: N r_f, how often the job
    has it, and u0 + dt/2, the time that it costs."""
    lost = math.fsum(failures_per_s * seconds for failures_per_s, seconds in losses)
    return max(0.0, 1 - lost) / (1 + cost_s / every_s)


# Sizes -----------------------------------------------------------------------------------------------


def mlperf_optimizer_bytes(parameters: int, hidden: int, ranks: int) -> int:
    """Return the bytes of the optimizer that a rank of MLPerf Storage writes: 3 x (P // (DP TP PP) + 5 h) x 4
    (mlcommons/storage: base_checkpointing.py of dlio_benchmark)."""
    return 3 * (parameters // ranks + 5 * hidden) * 4
