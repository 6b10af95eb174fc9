"""Restoring a plain value: it is replaced as a whole, except for skipped entries.

A dict of the state may hold tensors or objects where the checkpoint holds a plain dict. Then only its plain entries are
replaced.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from tierfall.core.image.tree import CodecNode, ValueNode
from tierfall.core.load import assign
from tierfall.core.load.build import CPU
from tierfall.core.load.choices import Blob, plain_value, value_blobs
from tierfall.core.load.plan import RestoreWork, Setter, live_names
from tierfall.core.tensors import names, value_codec
from tierfall.core.types.errors import RestoreError
from tierfall.core.types.text import with_article

logger = logging.getLogger("tierfall")
_COMPARED_MAPPINGS = (dict, OrderedDict)
"""Their keys are names that a program chose. The keys of a Counter are data."""


class ValueFiller:
    """Plans one plain value as part of a restore. ``live`` is the state's value under ``name``; ``set_value`` replaces
    it."""

    def __init__(
        self,
        work: RestoreWork,
        node: ValueNode | CodecNode,
        live: Any,
        set_value: Setter,
        name: str,
    ) -> None:
        self._work = work
        self._node = node
        self._live = live
        self._set_value = set_value
        self._name = name

    def plan(self) -> None:
        work, node = self._work, self._node
        try:
            work.builder.prepare(node, CPU)
        except RestoreError as error:  # a class that is not imported, for example
            reason = str(error).removeprefix("restore: ")
            work.report.refuses(self._name, f"{reason}; skip=[{self._name!r}] leaves it unchanged")
            return
        stored = plain_value(work.header, node) if isinstance(node, ValueNode) else None
        if isinstance(node, ValueNode):
            if isinstance(self._live, dict | list | set):
                work.note_object(self._live, self._name, work.header.values[node.number])
            if node.blobs:
                self._share(value_blobs(work.header, node), self._live, self._name)
        self._compare_keys(stored, self._live, self._name)
        if holds_tensors(self._live):
            self._compare_objects(stored, self._live, self._name)
            work.assignments.append(self._assign_plain_entries)
        else:
            work.assignments.append(self._assign)

    # ---- before the bytes

    def _compare_keys(self, stored: Any, live: Any, name: str) -> None:
        """Compare the keys of a plain dict with those in the checkpoint, and of the dicts in it.

        Keys that only the checkpoint has are restored: the program added them after its start. Keys that only the state
        has are removed by the restore. That is an error at the start of a program. After training it is allowed, since
        the program may have added them after the checkpoint; unless both sides have identifiers that the other lacks,
        for then a key was misspelt or renamed.
        """
        if type(live) not in _COMPARED_MAPPINGS or type(stored) not in _COMPARED_MAPPINGS:
            return
        report = self._work.report
        plain = [key for key in live if not holds_tensors(live[key])]
        only_live = [key for key in plain if key not in stored and not self._is_skipped(name, key)]
        only_stored = [key for key in stored if key not in live and not self._is_skipped(name, key)]
        texts = [key for key in only_live if isinstance(key, str)]
        renamed = _are_identifiers(only_live) and _are_identifiers(only_stored)
        if texts and (renamed or not self._work.choices.is_going_back):
            for key in texts:
                report.extra(names.join(name, names.component(key)))
            for key in only_stored if renamed else ():
                report.absent(names.join(name, names.component(key)))
        elif only_live and stored and len(plain) == len(live):
            self._work.assignments.append(lambda: _log_removed(only_live, name))
        for key in plain:
            if key in stored and not self._is_skipped(name, key):
                self._compare_keys(stored[key], live[key], names.join(name, names.component(key)))

    def _share(self, stored: Any, live: Any, name: str) -> None:
        """Record the arrays and generators of ``live`` that are changed in place."""
        if isinstance(stored, Blob):
            assert isinstance(self._node, ValueNode), "a blob of no value"
            self._work.matcher.share(self._node.blobs[stored.number], live, name)
        elif type(live) is not type(stored):
            return
        elif type(live) in value_codec.MAPPINGS:
            for key, child in live.items():
                if key in stored and not self._is_skipped(name, key):
                    self._share(stored[key], child, names.join(name, names.component(key)))
        elif type(live) in (list, tuple):
            for index, (below, child) in enumerate(zip(stored, live, strict=False)):
                self._share(below, child, f"{name}.{index}")

    def _compare_objects(self, stored: Any, live: Any, name: str) -> None:
        """Report the tensors and objects of ``live`` that the plain value in the checkpoint lacks."""
        if type(live) in value_codec.MAPPINGS and type(stored) in value_codec.MAPPINGS:
            for key, child in live.items():
                below = names.join(name, names.component(key))
                if not holds_tensors(child) or self._is_skipped(name, key):
                    continue
                if key in stored:
                    self._compare_objects(stored[key], child, below)
                else:
                    self._work.extra(child, below)
        elif stored in ([], ()):
            self._work.extra(live, name)
        else:
            self._work.report.differs(name, "a plain value", with_article(type(live).__qualname__))

    def _is_skipped(self, name: str, key: Any) -> bool:
        return self._work.selection.skipped(names.join(name, names.component(key)))

    # ---- after the bytes

    def _assign(self) -> None:
        value = self._work.builder.build(self._node, CPU)
        self._keep_skipped(self._live, value, self._name)
        self._set_value(assign.merge(self._live, value))

    def _assign_plain_entries(self) -> None:
        """Replace the plain entries of a dict that holds tensors, too."""
        live, source = self._live, self._work.builder.build(self._node, CPU)
        if type(live) not in value_codec.MAPPINGS or type(source) not in value_codec.MAPPINGS:
            return
        self._keep_skipped(live, source, self._name)
        for key, value in source.items():
            if key not in live or not holds_tensors(live[key]):
                live[key] = assign.merge(live.get(key), value)

    def _keep_skipped(self, live: Any, value: Any, name: str) -> None:
        """Copy the skipped entries of ``live`` into the mapping that replaces it."""
        if type(live) not in value_codec.MAPPINGS or type(value) not in value_codec.MAPPINGS:
            return
        for key in [*value, *(key for key in live if key not in value)]:
            if not self._is_skipped(name, key):
                if key in live and key in value:
                    self._keep_skipped(
                        live[key], value[key], names.join(name, names.component(key))
                    )
            elif key in live:
                value[key] = live[key]
            else:
                del value[key]


def _are_identifiers(keys: Sequence[Any]) -> bool:
    """Return whether ``keys`` is not empty and holds only identifiers, not step numbers and other data."""
    return bool(keys) and all(isinstance(key, str) and key.isidentifier() for key in keys)


def _log_removed(keys: Sequence[Any], name: str) -> None:
    logger.warning(
        "restore: %s of %s is not in the checkpoint, and is removed: a plain mapping is replaced as a whole "
        "(skip=[%r] keeps it)",
        ", ".join(map(repr, keys)),
        name,
        names.join(name, names.component(keys[0])),
    )


def holds_tensors(live: Any) -> bool:
    """Return whether a value of the state is, or holds, a tensor or an object with a state_dict."""
    return any(True for _ in live_names(live, ""))
