"""Checks of the chain of tiers as a whole: which kinds, in which order, and no duplicates.

They check links, the few relevant properties of each tier, so that they apply to a valid configuration and to one with
errors elsewhere. Messages name places, never values: a value may be from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierfall.config.source import Problem
from tierfall.core.types.text import with_article
from tierfall.core.types.values import TierKind

FOLDER = "file://"
_RANKS = {
    TierKind.DEVICE: 0,
    TierKind.HOST: 1,
    TierKind.PEER: 2,
    TierKind.FILE: 2,
    TierKind.OBJECT: 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The properties of one tier; None where missing or invalid. ``unshared``: the file has ``shared: false``."""

    name: str | None = None
    kind: TierKind | None = None
    folder: str | None = None
    url: str | None = None
    unshared: bool = False


def link_of(tier: object, base: Path | None = None) -> Link:
    """Return the link of a tier as YAML yields it, valid or not; a relative path starts at ``base``."""
    if not isinstance(tier, Mapping):
        return Link()
    name, kind, path, url = (tier.get(key) for key in ("name", "kind", "path", "url"))
    endpoint = _endpoint(tier.get("options"))
    folder = None
    if isinstance(path, str | os.PathLike) and path:
        folder = os.path.join(base or "", os.path.expanduser(path))
    if isinstance(url, str) and url.startswith(FOLDER):
        folder, url = url.removeprefix(FOLDER), None
    return Link(
        name=name if isinstance(name, str) else None,
        kind=TierKind(kind) if isinstance(kind, str) and kind in set(TierKind) else None,
        folder=str(folder) if folder else None,
        url=f"{url.rstrip('/')} {endpoint}" if isinstance(url, str) else None,
        unshared=tier.get("shared") in (False, "false"),
    )


def _endpoint(options: object) -> str:
    """Return the server that the options name: two servers may have buckets of the same name."""
    if not isinstance(options, Mapping):
        return ""
    client = options.get("client_kwargs")
    found = options.get("endpoint_url") or options.get("account_name")
    if not found and isinstance(client, Mapping):
        found = client.get("endpoint_url")
    return str(found or "")


def check_chain(links: Sequence[Link]) -> list[Problem]:
    """Return the problems of the chain, each with its place."""
    if not links:
        return [_problem("the list is empty; expected at least a tier of kind host", "tiers")]
    folders = [_real_path(link.folder) if link.folder else None for link in links]
    keys = ["url" if link.kind is TierKind.OBJECT else "path" for link in links]
    return [
        *_kinds(links),
        *_inside(folders),
        *_order(links),
        *_shared(links),
        *_twice(
            [link.name for link in links],
            ["name"] * len(links),
            "tiers are identified by their names",
        ),
        *_twice(folders, keys, "two tiers in one folder would count one copy as two"),
        *_twice(
            [link.url for link in links], keys, "two tiers in one place would count one copy as two"
        ),
    ]


def _shared(links: Sequence[Link]) -> Iterator[Problem]:
    for index, link in enumerate(links):
        if link.kind is TierKind.OBJECT and link.url is not None and link.unshared:
            yield _problem(
                "every node sees an object store; leave shared out", "tiers", index, "shared"
            )


def _inside(folders: Sequence[str | None]) -> Iterator[Problem]:
    for index, folder in enumerate(folders):
        for other, around in enumerate(folders):
            if folder and around and folder != around and Path(folder).is_relative_to(around):
                yield _problem(
                    f"inside the folder of tiers[{other}], which would take it for a run of its own; expected a folder "
                    "beside it",
                    *("tiers", index, "path"),
                )


def _real_path(path: str) -> str | None:
    try:
        return os.path.realpath(path)
    except ValueError:  # not a path: the field's own check reports it
        return None


def _problem(message: str, *place: str | int) -> Problem:
    return Problem(place=place, message=message)


def _kinds(links: Sequence[Link]) -> Iterator[Problem]:
    kinds = [link.kind for link in links]
    for kind in (TierKind.DEVICE, TierKind.HOST, TierKind.PEER):
        for index in [i for i, found in enumerate(kinds) if found is kind][1:]:
            expected = "exactly one" if kind is TierKind.HOST else "one at most"
            yield _problem(f"a second {kind} tier; expected {expected}", "tiers", index, "kind")
    if TierKind.HOST not in kinds and None not in kinds:
        yield _problem(
            "there is no host tier, and every checkpoint passes through one; add {name: host, kind: host}",
            "tiers",
        )


def _order(links: Sequence[Link]) -> Iterator[Problem]:
    """The order is device, host, then stored tiers, which the user orders, fastest first."""
    highest = 0
    for index, link in enumerate(links):
        if link.kind is None:
            continue
        if _RANKS[link.kind] < highest:
            yield _problem(
                f"{with_article(link.kind)} tier must come earlier; expected device, host, then peer, file and object "
                "tiers, fastest first",
                *("tiers", index, "kind"),
            )
        highest = max(highest, _RANKS[link.kind])


def _twice(values: Sequence[Hashable | None], keys: Sequence[str], why: str) -> Iterator[Problem]:
    first: dict[Hashable, int] = {}
    for index, value in enumerate(values):
        if value is not None and first.setdefault(value, index) != index:
            yield _problem(
                f"the same {keys[index]} as tiers[{first[value]}]; {why}",
                *("tiers", index, keys[index]),
            )
