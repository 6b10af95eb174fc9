"""docs/json.md as tables of fields, and what a document of a command has otherwise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tierfall.telemetry.figures import FIGURES, Statistics

PAGE = Path(__file__).resolve().parents[1] / "docs" / "json.md"
_ROW = re.compile(r"^\| (`[^|]+`) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
_BASE = re.compile(r"^The fields of a \[.*\]\(#(.*)\), and\b.*:$", re.MULTILINE)
_FIGURES = re.compile(r"^The figures of a (tier|run)\b", re.MULTILINE)
_ENVELOPE = "every-document"
_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "number or text": (int, float, str),
    "text": (str,),
    "boolean": (bool,),
    "object": (dict,),
}
_NAMES = {int: "integer", float: "number", str: "text", bool: "boolean", type(None): "null"}
Seen = set[tuple[str, str]]


@cache
def sections() -> dict[str, dict[str, str]]:
    """The fields of each section with their types, by the anchor of its heading, or by each command in it."""
    found: dict[str, dict[str, str]] = {}
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    bases = {}
    for part in parts:
        title = part.partition("\n")[0]
        rows = {
            name: kind for names, kind in _ROW.findall(part) for name in re.findall(r"\w+", names)
        }
        for name in title.split(", "):
            found[name.replace(" ", "-")] = rows
            if base := _BASE.search(part):
                bases[name.replace(" ", "-")] = base[1]
            if figures := _FIGURES.search(part):
                bases[name.replace(" ", "-")] = f"figures of a {figures[1]}"
    found |= {f"figures of a {of}": _figures(of) for of in ("tier", "run")}
    for name, base in bases.items():
        found[name] = found[base] | found[name]
    return {name.lower(): rows for name, rows in found.items()}


def _figures(of: str) -> dict[str, str]:
    """The figures of a tier, or those of a run that have one value, with their types as they are declared."""
    hints = get_type_hints(Statistics)
    found = {}
    for name, figure in FIGURES.items():
        if figure.per == (of if of == "tier" else None):
            hint = hints.get(name) or get_type_hints(getattr(Statistics, name).fget)["return"]
            hint = get_args(hint)[1] if figure.per else hint
            kinds = [_NAMES[each] for each in get_args(hint) or (hint,)]
            found[name] = " or ".join((*kinds, "absent"))
    return found


def faults(document: dict[str, Any], command: str, seen: Seen) -> list[str]:
    """Say where a command's document is not as on the page; add the fields that have a value to ``seen``."""
    envelope = {name: document.get(name) for name in sections()[_ENVELOPE]}
    own = {name: value for name, value in document.items() if name not in envelope}
    if own.keys() == {"run", "steps"}:
        wrong = [fault for one in own["steps"] for fault in _of_object(one, command, seen)]
    else:
        wrong = [*_of_object(own, command, seen)]
    return [*_of_object(envelope, _ENVELOPE, seen), *wrong]


def _of_object(value: dict[str, Any], section: str, seen: Seen) -> Iterator[str]:
    fields = sections()[section]
    for name in fields.keys() - value.keys():
        if not fields[name].endswith(" or absent"):
            yield f"{section}: {name} is not in the document"
    for name, member in value.items():
        if name not in fields:
            yield f"{section}: {name} is not on the page"
            continue
        if member not in (None, [], {}):
            seen.add((section, name))
        kind = fields[name].removesuffix(" or absent")
        yield from _of_type(member, kind, f"{section}: {name}", seen)


def _of_type(value: Any, kind: str, where: str, seen: Seen) -> Iterator[str]:
    if kind.startswith("null or ") or (kind.endswith(" or null") and not kind.startswith("by ")):
        if value is None:
            return
        kind = kind.removeprefix("null or ").removesuffix(" or null")
    by = re.fullmatch(r"by \w+: (.*)", kind)
    link = re.fullmatch(r"\[.*\]\(#(.*)\)", kind)
    if kind.startswith("list of ") and isinstance(value, list):
        for one in value:
            yield from _of_type(one, kind.removeprefix("list of "), where, seen)
    elif by and isinstance(value, dict):
        for one in value.values():
            yield from _of_type(one, by[1], where, seen)
    elif link and isinstance(value, dict):
        yield from _of_object(value, link[1], seen)
    elif type(value) not in _TYPES.get(kind, ()):
        yield f"{where}: {value!r} is not: {kind}"
