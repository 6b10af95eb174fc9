"""The conformance suite: what a backend must promise, checked with no test framework."""

from tierfall.backends.conformance.suite import CHECKS, check_backend, check_promise

__all__ = ["CHECKS", "check_backend", "check_promise"]
