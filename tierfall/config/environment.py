"""Fills in ``${env:NAME}`` wherever text stands in a configuration, and remembers what the text was before.

What a variable holds may be a secret: messages are written with the text as the file has it. What was filled in is not
looked at again, so a variable's value may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierfall.config.places import Place, Problem

_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)\}|(\$\{[^}]*\}?)")
_BRACED = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")


@dataclass(slots=True)
class EnvironmentFill:
    """Fills values in, and collects what was hidden and what went wrong."""

    environ: Mapping[str, str]
    hidden: dict[Place, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def fill(self, value: object, place: Place = ()) -> object:
        """Return a copy of the value in plain dicts and lists, with every reference replaced."""
        match value:
            case str():
                return self._fill_text(value, place)
            case Mapping():
                return {key: self.fill(inner, (*place, key)) for key, inner in value.items()}
            case list() | tuple():
                return [self.fill(inner, (*place, index)) for index, inner in enumerate(value)]
            case _:
                return value

    def original(self, place: Place) -> str | None:
        """Return the text that stood at a place, or at one around it, where a variable was filled in."""
        around = (place[:length] for length in range(len(place), -1, -1))
        return next((self.hidden[part] for part in around if part in self.hidden), None)

    def _fill_text(self, text: str, place: Place) -> str:
        if "${" not in text:
            return text
        self.hidden[place] = text
        return _REFERENCE.sub(lambda match: self._value_of(match, place), text)

    def _value_of(self, match: re.Match[str], place: Place) -> str:
        name, malformed = match[1], match[2]
        if malformed is not None:
            hint = f": write ${{env:{malformed[2:-1]}}}" if _BRACED.fullmatch(malformed) else ""
            self._complain(place, f"{malformed} is not a reference; expected ${{env:NAME}}{hint}")
            return "nothing"  # text, so that no other reader complains of the same
        if name not in self.environ:
            self._complain(
                place, f"the environment variable {name} is not set; set it, or write the value"
            )
            return match[0]
        return self.environ[name]

    def _complain(self, place: Place, message: str) -> None:
        self.problems.append(Problem(place=place, message=message))
