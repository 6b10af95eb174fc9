"""docs/configuration.md: its tables of keys are those of the model.

``python -m tests.test_docs_configuration`` writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tierfall.config import Config

PAGE = Path(__file__).resolve().parents[1] / "docs/configuration.md"
HEAD = "| key | default | meaning | example |\n|---|---|---|---|\n"
SCHEMA = Config.model_json_schema()
SECTIONS = {name: part for name, part in SCHEMA["$defs"].items() if "properties" in part}
HEADINGS = {
    "IntervalSection": "`interval`",
    "Mtbf": "`mtbf`",
    "CaptureSection": "`capture`",
    "DrainSection": "`drain`",
    "EventsSection": "`events`",
    "MetricsSection": "`metrics`",
    "HostTierConfig": "A host tier",
    "FileTierConfig": "A file tier",
    "PeerTierConfig": "A peer tier",
    "ObjectTierConfig": "An object tier",
    "DeviceTierConfig": "A device tier",
    "FlushSection": "`flush`",
    "RetainSection": "`retain`",
    "BestSection": "`best`",
    "EvictSection": "`evict`",
    "CompressSection": "`compress`",
}
"""Where the page has the table of each section."""


def flow(value: object) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return "`" + text.removesuffix("...\n").strip() + "`"


def row(key: str, member: dict[str, Any], *, required: bool) -> str:
    default = member.get("default")
    shown = "required" if required else "none" if default in (None, []) else flow(default)
    meaning = " ".join(member["description"].split())
    linked = re.findall(r"'#/\$defs/(\w+)'", str(member))
    if HEADINGS.get(linked[0] if linked else "") == f"`{key}`":
        if default is None:
            meaning += f" [Its keys](#{key})."
        else:
            shown = f"[its own](#{key})"
    return f"| `{key}` | {shown} | {meaning} | {flow(member['examples'][0])} |\n"


def table(name: str | None) -> str:
    """The keys of a section; of a tier, without those that are as for a file tier."""
    section = SCHEMA if name is None else SECTIONS[name]
    like = SECTIONS["FileTierConfig"]["properties"] if name != "FileTierConfig" else {}
    keys = [k for k, m in section["properties"].items() if k == "name" or m != like.get(k)]
    first = [key for key in ("name", "kind", "path") if key in keys and "kind" in keys]
    return HEAD + "".join(
        row(key, section["properties"][key], required=key in section.get("required", ()))
        for key in dict.fromkeys([*first, *keys])
    )


def page(text: str) -> str:
    """The page with the tables of the model."""
    for name, heading in {None: "The first level", **HEADINGS}.items():
        before = rf"(^#+ {re.escape(heading)}\n(?:(?!#|\| key).*\n)*)"
        written = table(name)
        text, found = re.subn(
            rf"{before}{re.escape(HEAD)}(?:\|.*\n)+",
            lambda match, written=written: match[1] + written,
            text,
            flags=re.MULTILINE,
        )
        assert found == 1, f"{heading} has no table of keys"
    return text


def test_the_tables_of_keys_are_those_of_the_model() -> None:
    assert set(HEADINGS) == set(SECTIONS)
    how = "python -m tests.test_docs_configuration writes the tables"
    assert PAGE.read_text() == page(PAGE.read_text()), how


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
