"""Backends: where a tier stores bytes; and the wrappers around them. The contract is ``core.contracts``."""
