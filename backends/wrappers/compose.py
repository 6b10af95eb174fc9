"""The one place where a backend gets its wrappers, in the order that production uses.

From the inside: the limit sits on the medium, so that every byte that goes there is counted, those of a second try
too, and no slot is held while a retry waits; retrying is outermost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tierfall.backends.wrappers.limit import Limited
from tierfall.backends.wrappers.retry import Retrying
from tierfall.core.runtime.rate_limit import Pace
from tierfall.core.types.backend import Backend


def wrap(
    inner: Backend,
    *,
    bandwidth: int | None = None,
    max_parallel: int | None = None,
    writes: Pace | None = None,
    tries: int = 5,
    first_wait_s: float = 0.2,
    longest_wait_s: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    rng: random.Random | None = None,
) -> Backend:
    """Return ``inner`` as a tier uses it: limited to ``bandwidth`` bytes a second each way and ``max_parallel`` calls
    (None: no limit), and retried up to ``tries`` times. What goes there keeps to ``writes`` where that is given."""
    backend = inner
    if bandwidth is not None or max_parallel is not None or writes is not None:
        backend = Limited(
            backend,
            bytes_per_second=bandwidth,
            max_parallel=max_parallel,
            writes=writes,
            clock=clock,
            sleep=sleep,
        )
    return Retrying(
        backend,
        tries=tries,
        first_wait_s=first_wait_s,
        longest_wait_s=longest_wait_s,
        sleep=sleep,
        rng=rng,
    )
