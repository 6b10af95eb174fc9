"""Calls to tiers that end within a bound: questions to one tier, the reads of a restore, and closing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from tierfall.config import Config
from tierfall.core.copies.bounded_store import BoundedStore
from tierfall.core.runtime.bounded_calls import BoundedCalls, NotAskedError
from tierfall.core.types.errors import TierfallError
from tierfall.setup.tiers import READ_BYTES_PER_S_MIN, SHARES, bounds_s
from tierfall.tiers.stored import StoredTier

logger = logging.getLogger("tierfall")
T = TypeVar("T")


class AskTier(Protocol):
    """Makes a call to the tier of that name, and returns its value or raises its error."""

    def __call__(self, tier: str, call: Callable[[], T], /) -> T: ...


def ask_without_bound(tier: str, call: Callable[[], T]) -> T:
    return call()


def ask_within_bound(
    config: Config, stores: Mapping[str, StoredTier], calls: BoundedCalls
) -> AskTier:
    """Return what makes calls that raise UnreachableError where the tier does not answer within its bound."""

    def ask(tier: str, call: Callable[[], T]) -> T:
        return calls.call_all(
            {tier: call},
            bounds_s(config),
            doing="ask",
            last_answer_s=lambda name: stores[name].last_answer_s(),
        )[tier].get()

    return ask


def bounded(store: StoredTier, config: Config) -> BoundedStore:
    """Return a tier for reading, whose reads have a bound. With a configured rate, a read has as much longer as all
    reads in flight take at that rate."""
    limit = next((t.bandwidth_bytes_per_s for t in config.stored if t.name == store.name), None)
    slowest = READ_BYTES_PER_S_MIN if limit is None else min(READ_BYTES_PER_S_MIN, limit / SHARES)
    return BoundedStore(
        store,
        bound_s=bounds_s(config)[store.name],
        bytes_per_s_min=slowest,
        last_answer_s=store.last_answer_s,
    )


def close_stores(stores: Mapping[str, StoredTier], timeout_s: float) -> None:
    """Close tiers, side by side. What does not end within ``timeout_s`` seconds is logged, and left to its thread."""
    bounds = dict.fromkeys(stores, timeout_s)
    calls = {name: store.close for name, store in stores.items()}
    for name, answer in BoundedCalls().call_all(calls, bounds, doing="close").items():
        match answer.error:
            case NotAskedError() as error:  # the interpreter ends, and closes what is open
                logger.debug("tier %s is not closed: %s", name, error)
            case TierfallError() as error:
                logger.warning("tier %s was not closed: %s", name, error)
            case _:
                answer.get()
