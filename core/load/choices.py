"""What a caller chooses to restore: a part, entries to skip, other names, other classes.

Names are dotted, as in the image; in ``skip`` a ``*`` stands for one component.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tierfall.core.image.header import ImageHeader
from tierfall.core.image.tree import (
    MapNode,
    ModuleNode,
    Node,
    OptimizerNode,
    SequenceNode,
    ValueNode,
    leaves,
    names_above,
)
from tierfall.core.tensors import builtin_codecs, value_codec
from tierfall.core.tensors import names as naming
from tierfall.core.tensors.value_codec import Contents
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import list_fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The options of a restore; by default, all of the state is filled by equal names. Raises RestoreError where one
    is not a list, or not a mapping, of names.

    ``is_going_back``: the state has been trained since the checkpoint, so that its plain mappings may have new keys.
    ``doing``: the call, for error messages.
    """

    only: Sequence[str] | None = None
    skip: Sequence[str] | None = None
    rename: Mapping[str, str] | None = None
    retype: Sequence[str] | None = None
    resize: Sequence[str] | None = None
    strict: bool = True
    is_going_back: bool = False
    doing: str = "restore"

    def __post_init__(self) -> None:
        for what in ("only", "skip", "retype", "resize"):
            names = getattr(self, what)
            if names is not None and (fault := list_fault(names)):
                raise RestoreError(f"{self.doing}: {what} {fault}")
        if self.rename is not None and not _are_names(self.rename):
            raise RestoreError(
                "restore: rename must be a mapping {name in the checkpoint: name in the state}, such as "
                f"{{'encoder': 'backbone'}}, not {self.rename!r}; to leave an entry of the state unchanged, pass "
                "skip=[...]"
            )

    @property
    def is_any_given(self) -> bool:
        """Whether the call chooses what is restored."""
        chosen = (self.only, self.skip, self.rename, self.retype, self.resize)
        return any(chosen) or not self.strict

    def has(self, name: str) -> bool:
        """Return whether ``name`` is selected: at or below a name of ``only`` (None: any name), and not skipped."""
        asked = self.only is None or any(naming.is_within(name, each) for each in self.only)
        return asked and not self.skipped(name)

    def selects_at_or_below(self, name: str) -> bool:
        """Return whether anything at or below ``name`` is selected."""
        if self.skipped(name):
            return False
        return self.has(name) or any(naming.is_within(each, name) for each in self.only or ())

    def skipped(self, name: str) -> bool:
        """Return whether ``name`` stays unchanged in the state."""
        return any(_matches(name, pattern) for pattern in self.skip or ())

    def resizes(self, name: str) -> bool:
        """Return whether the tensor at ``name`` may have another shape in the state."""
        return any(_matches(name, pattern) for pattern in self.resize or ())


def _are_names(rename: object) -> bool:
    return isinstance(rename, Mapping) and all(
        isinstance(name, str) and name for both in rename.items() for name in both
    )


def _matches(name: str, pattern: str) -> bool:
    parts, expected = name.split("."), pattern.split(".")
    return len(expected) <= len(parts) and all(
        one in ("*", part) for one, part in zip(expected, parts, strict=False)
    )


def check_names(header: ImageHeader, choices: Choices, live: Iterable[str]) -> None:
    """Raise RestoreError for a chosen name that occurs nowhere. ``live`` are the names of the state.

    The header has been renamed to the names of the state.
    """
    whole = [name for name, _ in leaves(header.tree, "")]
    for prefix in choices.only or ():
        _check_only(prefix, whole, header.what, choices.doing)
    both = [*stored_names(header), *live] if choices.skip or choices.resize else []
    patterns = [("skip", each) for each in choices.skip or ()]
    patterns += [("resize", each) for each in choices.resize or ()]
    for what, pattern in patterns:
        if not any(_matches(name, pattern) for name in both):
            raise RestoreError(
                f"restore: {what}={pattern!r} names nothing in {header.what} or in the state; nearest: "
                f"{nearest(pattern, both)}"
            )
    for name in choices.retype or ():
        if name not in header.types:
            raise RestoreError(
                f"restore: retype={name!r} names no optimizer or object of {header.what}; it has "
                f"{', '.join(sorted(header.types)) or 'none'}"
            )


def _check_only(prefix: str, names: Sequence[str], what: str, doing: str) -> None:
    if any(naming.is_within(name, prefix) for name in names):
        return
    whole = next((name for name in names if naming.is_within(prefix, name)), None)
    if whole is not None:
        raise RestoreError(
            f"{doing}: only={prefix!r} is a part of {whole!r}, which can only be restored as a whole: pass {whole!r}"
        )
    raise RestoreError(
        f"{doing}: {what} has no entry named {prefix!r}; nearest: {nearest(prefix, names)}"
    )


def nearest(wanted: str, names: Iterable[str]) -> str:
    known = {part for name in names for part in (*names_above(name), name)}
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.3)
    return ", ".join(near or sorted(known)[:3])


def stored_names(header: ImageHeader) -> Iterator[str]:
    """Yield the names of the leaves, and of the entries of plain mappings."""
    for name, node in leaves(header.tree, ""):
        yield name
        if isinstance(node, ValueNode):
            yield from key_names(plain_value(header, node), name)


def key_names(value: object, name: str) -> Iterator[str]:
    """Yield the names of the entries of a plain mapping, and of the mappings in it; none of another value."""
    if type(value) in value_codec.MAPPINGS:
        for key, child in value.items():  # type: ignore[attr-defined]
            try:
                below = naming.join(name, naming.component(key))
            except builtin_codecs.NotEncodableError:  # no checkpoint has such a key
                continue
            yield below
            yield from key_names(child, below)


def plain_value(header: ImageHeader, node: ValueNode) -> object:
    """Return a plain value; None replaces each array, long text and value of a registered codec."""
    return value_codec.decode(header.values[node.number], Contents())


@dataclass(frozen=True, slots=True)
class Blob:
    """Stands for an array, a generator or long text of a value: the one of this number."""

    number: int


def value_blobs(header: ImageHeader, node: ValueNode) -> object:
    """Return a plain value with a ``Blob`` in each of their places."""
    return value_codec.decode(
        header.values[node.number], Contents(lambda number, kind, members: Blob(number))
    )


# ---- renaming


def renamed(header: ImageHeader, rules: Mapping[str, str] | None) -> ImageHeader:
    """Return a header with other names: ``rules`` map a name, of an entry or of all below it, to a new one.

    Raises RestoreError where a rule matches nothing, or would move an entry to another mapping.
    """
    if not rules:
        return header
    names = [*stored_names(header)]
    for old in rules:
        if not any(naming.is_within(name, old) for name in names):
            raise RestoreError(
                f"restore: rename={{{old!r}: ...}}: {header.what} has no entry of that name; nearest: "
                f"{nearest(old, names)}"
            )
    renaming = _Renamer(rules)
    tree = renaming.node(header.tree, "", "")
    assert isinstance(tree, MapNode)
    for old in rules.keys() - renaming.used:
        raise RestoreError(
            f"restore: rename={{{old!r}: {rules[old]!r}}}: {old!r} is part of a plain value, or of an object's state, "
            "which is restored as a whole; rename that, or change the key after the restore"
        )
    types = {renaming.name(name): kind for name, kind in header.types.items()}
    return replace(header, tree=tree, types=types)


class _Renamer:
    """Renames the nodes of a tree. ``used`` are the rules that have matched."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = rules
        self.used: set[str] = set()

    def name(self, name: str) -> str:
        """Return a name after the longest rule that matches it."""
        fitting = [old for old in self._rules if naming.is_within(name, old)]
        if not fitting:
            return name
        self.used.update(fitting)
        longest = max(fitting, key=len)
        return self._rules[longest] + name[len(longest) :]

    def node(self, node: Node, old: str, new: str) -> Node:
        """Return a node that was named ``old``, and is ``new``, with new names below it."""
        match node:
            case MapNode():
                found = self._children(node, [key for key, _ in node.entries], old, new)
                return MapNode(node.kind, tuple(found))
            case ModuleNode():
                found = self._children(node, [below for _, below, _ in node.entries], old, new)
                keys = [key for key, _, _ in node.entries]
                return ModuleNode(
                    tuple((key, *each) for key, each in zip(keys, found, strict=True))
                )
            case OptimizerNode():
                return replace(node, names=tuple(n and self.name(n) for n in node.names))
            case SequenceNode():
                found = self._children(node, [*range(len(node.nodes))], old, new)
                return SequenceNode(node.is_tuple, tuple(child for _, child in found))
        return node

    def _children(
        self, parent: Node, keys: Sequence[Any], old: str, new: str
    ) -> list[tuple[Any, Node]]:
        """Return the children of a mapping, a module or a sequence by their new keys."""
        found: dict[Any, Node] = {}
        for key, (before, child) in zip(keys, parent.named(old), strict=True):
            after = self.name(before)
            here = naming.join(new, before.removeprefix(f"{old}." if old else ""))
            # a module whose new name is below its own is within another one now
            is_inside = isinstance(child, ModuleNode) and naming.is_within(after, here)
            if after == here or is_inside:
                below, after = key, here
            elif isinstance(parent, SequenceNode):
                raise RestoreError(
                    f"restore: rename: {before!r} is an element of a sequence, which cannot have another name"
                )
            else:
                below = _below(after, new, before)
                if isinstance(parent, MapNode) and naming.component(below) != below:
                    raise RestoreError(
                        f"restore: rename={{{before!r}: {after!r}}}: {below!r} is not a single key; a key has "
                        "letters, digits and underscores"
                    )
            if below in found:
                raise RestoreError(
                    f"restore: rename would give two entries the name {naming.join(new, str(below))!r}"
                )
            found[below] = self.node(child, before, after)
        return [*found.items()]


def _below(name: str, parent: str, before: str) -> str:
    """Return the part of a new name below that of its mapping or module."""
    if not parent:
        return name
    if not name.startswith(f"{parent}."):
        raise RestoreError(
            f"restore: rename: {before!r} would become {name!r}, which is not within {parent!r}: rename an entry of "
            "the state, or a name inside it"
        )
    return name[len(parent) + 1 :]
