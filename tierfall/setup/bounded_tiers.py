"""Calls to tiers that end within a bound: questions to one tier, the reads of a restore, and closing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from tierfall.config import Config
from tierfall.core.runtime.bounded_calls import BoundedCalls, NotAskedError
from tierfall.core.types.errors import TierfallError
from tierfall.setup.tiers import bounded, bounds_s
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


def bounded_reads(store: StoredTier, config: Config) -> StoredTier:
    """Return a tier of a trainer for reading, each read with a bound."""
    tier = next(tier for tier in config.stored if tier.name == store.name)
    backend = bounded(store.backend, tier, config, store.last_answer_s)
    return StoredTier(
        name=store.name,
        run=config.run,
        backend=backend,
        record=store.record,
        read_only="it is only to be read",
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
