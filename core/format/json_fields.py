"""Typed access to parsed, untrusted JSON: checks each member's type and range."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tierfall.core.types import keys
from tierfall.core.types.errors import ConfigError, IntegrityError

T = TypeVar("T")


class JsonFields:
    """Typed access to a parsed object; ``what`` names it in errors. Raises IntegrityError for a member that is missing
    or of another type."""

    def __init__(self, members: Mapping[str, Any], what: str) -> None:
        self._members = members
        self._what = what

    def has(self, name: str) -> bool:
        return name in self._members

    def get(self, name: str, kind: Any) -> Any:
        value = self._members.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise IntegrityError(f"{self._what}: member {name!r} is missing or of a wrong type")
        return value

    def number(self, name: str, low: int, high: int) -> int:
        value: int = self.get(name, int)
        if not low <= value <= high:
            raise IntegrityError(f"{self._what}: {name!r} is {value}, not within {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        """A bool; false if the member is missing."""
        value = self._members.get(name, False)
        if not isinstance(value, bool):
            raise IntegrityError(f"{self._what}: member {name!r} is neither true nor false")
        return value

    def flag_or_none(self, name: str) -> bool | None:
        """A bool, or None where the member is null or missing."""
        return None if self._members.get(name) is None else self.flag(name)

    def list_of(self, name: str, kind: type[T]) -> list[T]:
        values = self.get(name, list)
        if not all(isinstance(v, kind) and not isinstance(v, bool) for v in values):
            raise IntegrityError(f"{self._what}: {name!r} holds an entry of a wrong type")
        return list(values)

    def parse(self, name: str, parse: Callable[[Any], T], value: Any) -> T:
        try:
            return parse(value)
        except (ValueError, OverflowError) as error:
            raise IntegrityError(f"{self._what}: {name!r}: {error}") from error

    def real(self, name: str) -> float:
        value: float = self.parse(name, float, self.get(name, int | float))
        if not math.isfinite(value):
            raise IntegrityError(f"{self._what}: {name!r} is {value}, not a finite number")
        return value

    def name(self, name: str) -> str:
        """Text that becomes part of a key, restricted so that it cannot lead out of a folder."""
        value: str = self.get(name, str)
        try:
            return keys.check_name(value, what=f"{self._what}: {name!r}")
        except ConfigError as error:
            raise IntegrityError(str(error)) from error

    def optional(self, name: str, read: Callable[[JsonFields], T]) -> T | None:
        """An object, parsed by ``read``, or null; missing is an error."""
        if name not in self._members:
            raise IntegrityError(f"{self._what}: member {name!r} is missing")
        if self._members[name] is None:
            return None
        return read(JsonFields(self.get(name, dict), f"{self._what}: {name}"))
