"""The mismatches between a checkpoint and the state, reported before anything is written."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sized
from dataclasses import dataclass

from tierfall.core.tensors import names as naming
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import format_some, hint_at

_SHOWN = 10
ABSENT = "in the checkpoint, not in the state"
EXTRA = "in the state, not in the checkpoint"
_NAMED = 6
"""So many names make a call too long to read."""
_BY_NAME = (
    "rename={...} restores a tensor or an entry of the state from another name; only=[...] restores a part; "
    "strict=False leaves out what only one side has; a place of the state that is None, or an empty list or dict, "
    "takes what the checkpoint has there"
)


def advice_for_ranks(name: str, *, in_blocks: bool) -> str:
    """Return what to do about an entry in which the ranks that saved it differ, as whole tensors or ``in_blocks``."""
    other = (
        "for another number of ranks, tierfall.item(..., on_resize='per_rank', 'replicate' or 'drop') around it says "
        "what each rank gets"
    )
    if in_blocks:
        other = "the ranks that saved it restore it into the same blocks"
    return f"{other}; skip=[{name!r}] leaves it unchanged"


@dataclass(frozen=True, slots=True)
class _Line:
    """One mismatch. ``content`` describes an entry that one side lacks: an entry is only renamed to one of equal
    content. ``skip`` names what a restore can leave out on account of it: None for nothing, empty if another argument
    helps."""

    name: str
    reason: str
    content: object = None
    skip: str | None = None

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def key(self) -> str:
        return self.name.rpartition(".")[2]


class MismatchReport:
    """Collects mismatches. A name that only one side has counts only where ``strict``; other mismatches always
    count."""

    def __init__(
        self, strict: bool, renamed: Mapping[str, str] | None = None, *, given: bool = False
    ) -> None:
        """``renamed`` are the new names of the checkpoint's entries, by their names there; ``given``: the call says
        what is to be restored, so that other arguments would have to be united with its own."""
        self.strict = strict
        self._given = given
        self._renamed = renamed or {}
        self._lines: list[_Line] = []
        self._by_name = False
        self._resizable: list[str] = []
        self._dtypes: list[str] = []

    def differs(
        self, name: str, stored: str, live: str, *, resize: str = "", dtype: str = ""
    ) -> None:
        """Report an entry that both sides have. ``resize`` is the name of a tensor of another shape that may be
        resized, ``dtype`` the dtype of one that differs in that."""
        reason = f"the checkpoint has {stored}, the state has {live}"
        self._lines.append(_Line(name, reason, skip="" if resize else None))
        self._resizable += [resize] if resize and resize not in self._resizable else []
        self._dtypes += [dtype] if dtype else []
        self._by_name |= not (resize or dtype)

    def refuses(self, name: str, reason: str, *, skip: str | None = None) -> None:
        """Report an entry that cannot be restored; ``reason`` includes what to do, and ``skip`` is what it says may be
        left out."""
        self._lines.append(_Line(name, reason, skip=skip))

    def absent(self, name: str, content: object = None) -> None:
        """Report an entry that only the checkpoint has; without ``content`` it cannot be renamed."""
        self._one_side(_Line(name, ABSENT, content))

    def extra(self, name: str, content: object = None) -> None:
        """Report an entry that only the state has."""
        self._one_side(_Line(name, EXTRA, content, skip=name))

    def _one_side(self, line: _Line) -> None:
        if self.strict:
            self._by_name = True
            self._lines.append(line)

    def raise_if_any(self, what: str) -> None:
        """Raise RestoreError with the first mismatches, if there are any."""
        if not self._lines:
            return
        absent = [line for line in self._lines if line.reason is ABSENT]
        extra = [line for line in self._lines if line.reason is EXTRA]
        hints = {
            id(line): hint
            for line, hint in (*self._renames(absent, extra), *self._meant(absent, extra))
        }
        lines = [line for line in (*absent, *extra) if not line.parent]
        if not any(id(line) in hints for line in lines):
            # else all others may come of a misspelt entry, as those of an optimizer do
            lines = self._lines
        shown = "".join(
            f"\n  {line.name}: {line.reason}{hints.get(id(line), '')}" for line in lines[:_SHOWN]
        )
        count = len(lines)
        more = f"\n  and {count - _SHOWN} more" if count > _SHOWN else ""
        raise RestoreError(
            f"restore: {what} does not fit the state in {count} place{'s' if count > 1 else ''}:{shown}{more}"
            + self._advice()
            + self._call()
        )

    def _advice(self) -> str:
        """Return the arguments that help, by the kinds of the mismatches."""
        by_name = ["skip=[...] leaves an entry of the state unchanged"]
        if self._resizable:
            names = format_some([*map(repr, self._resizable)])
            by_name.insert(
                0, f"resize=[{names}] restores what both shapes of a tensor have in common"
            )
        by_name += [_BY_NAME] if self._by_name else []
        advice = f"\nTo allow it by name: {'; '.join(by_name)}."
        if self._dtypes:
            advice = (
                "\nA restore converts no dtype: restore into tensors of the checkpoint's dtypes and convert those "
                f"(model.to(torch.{self._dtypes[0]})), or convert what tierfall.load() returns."
                + advice
            )
        return advice if self._resizable or self._dtypes or self._by_name else ""

    def _call(self) -> str:
        """Return the arguments that restore all that fits; empty if there are none, or they are long. A rename is a
        guess, and is only hinted at; so is what only the checkpoint has, which may be the state's by another name."""
        if self._given or any(line.reason is ABSENT or line.skip is None for line in self._lines):
            return ""
        skip = list(dict.fromkeys(line.skip for line in self._lines if line.skip))
        skip = [n for n in skip if not any(n != s and naming.is_within(n, s) for s in skip)]
        given = {"resize": self._resizable, "skip": skip}
        if any(len(names) > _NAMED for names in given.values()):
            return ""
        arguments = ", ".join(f"{name}={names!r}" for name, names in given.items() if names)
        return f"\nTo restore what fits: restore(..., {arguments})"

    def _renames(self, absent: list[_Line], extra: list[_Line]) -> list[tuple[_Line, str]]:
        """Suggest names of the state for entries that only the checkpoint has, each once."""
        found, free = [], {line.name: line.content for line in extra}
        for line in absent:
            fitting = [
                name for name, content in free.items() if content == line.content is not None
            ]
            stored = self._stored_name(line.name)
            near = difflib.get_close_matches(stored, fitting, n=1, cutoff=0.8)
            if isinstance(line.content, Sized) and len(line.content) > 1 and len(fitting) == 1:
                near = fitting  # of several tensors: names and shapes in it are alike
            if near:
                del free[near[0]]
                hint = f" (rename={{{stored!r}: {near[0]!r}}}?)"
                if stored == near[0]:
                    hint = f" (it is {stored!r} in the checkpoint: leave out that rename)"
                found.append((line, hint))
        return found

    def _meant(self, absent: list[_Line], extra: list[_Line]) -> list[tuple[_Line, str]]:
        """Suggest keys of the checkpoint for those that only the state has."""
        stored = [line for line in absent if self._stored_name(line.name) == line.name]
        return [
            (line, hint)
            for line in extra
            if (
                hint := hint_at(
                    line.key, [other.key for other in stored if other.parent == line.parent]
                )
            )
        ]

    def _stored_name(self, name: str) -> str:
        """Return the name that an entry has in the checkpoint."""
        for old, new in self._renamed.items():
            if naming.is_within(name, new):
                return old + name.removeprefix(new)
        return name
