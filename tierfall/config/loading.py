"""Turns a file, a dict or a ready model into a ``Config``, or into one error that names everything that is wrong.

An error gives the place, what was expected, and the nearest known key; these come from the model itself (keys,
examples). A value that came from the environment is never shown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tierfall.config.fields import BASE, WRONG, fields_of, is_address, show
from tierfall.config.model import (
    CHAIN,
    TIER_MODELS,
    Config,
    FileTierConfig,
    HostTierConfig,
    ObjectTierConfig,
    PeerTierConfig,
    check_chain,
    link_of,
)
from tierfall.config.source import (
    EnvironmentFill,
    Place,
    Problem,
    YamlSource,
    read_yaml,
    write_place,
)
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.keys import check_name
from tierfall.core.types.text import hint_at, with_article
from tierfall.core.types.values import TierKind


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | Config,
    *,
    run: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the configuration in a YAML file, in a dict of the same shape, or in a ``Config``.

    ``run`` overrides the name of the run. ``${env:NAME}`` in text is replaced from ``environ``; its value appears in no
    message of this call. Relative paths in a file start at the file's folder, others at the working directory.

    Raises ConfigError; the message names every problem, each with file, line and place.
    """
    if run is not None:
        check_name(run, what="run")
    if isinstance(source, Config):
        return source if run is None else source.model_copy(update={"run": run})
    read = _read(source)
    filling = EnvironmentFill(environ)
    values = filling.fill(read.value)
    if not isinstance(values, dict):
        colon = (
            '; is a colon missing? "run: r", then "tiers: ./checkpoints"'
            if isinstance(values, str)
            else ""
        )
        raise ConfigError(f"{read.where(())}expected a mapping with at least run and tiers{colon}")
    if run is not None:
        values["run"] = run
    config, found = _validate(values, filling, read.folder)
    unfilled = {problem.place for problem in filling.problems}
    problems = [*read.problems, *filling.problems, *(p for p in found if p.place not in unfilled)]
    if config is None or problems:
        raise _config_error(read, problems)
    return config if read.folder is None else config.read_from(read.folder / Path(read.label).name)


def _read(source: str | os.PathLike[str] | Mapping[str, object]) -> YamlSource:
    if isinstance(source, Mapping):
        return YamlSource(label="", value=source)
    if isinstance(source, str | os.PathLike):
        return read_yaml(Path(source).expanduser())
    raise ConfigError(
        f"expected the path of a YAML file, a dict or a tierfall.Config, got {type(source).__name__}"
    )


def _validate(
    values: dict[str, object], filling: EnvironmentFill, base: Path | None
) -> tuple[Config | None, list[Problem]]:
    """Validate the values. The error is not chained: its details contain values from the environment."""
    try:
        return Config.model_validate(values, context={BASE: base}), []
    except ValidationError as error:
        problems = list(problems_of(error, filling))
        chain_checked = any(d["type"] == CHAIN for d in error.errors(include_url=False))
    # pydantic checks the chain only if all else is valid; one message is to name all problems
    tiers = values.get("tiers")
    if not chain_checked and isinstance(tiers, list):
        problems += check_chain([link_of(tier, base) for tier in tiers])
    return None, problems


def _config_error(source: YamlSource, problems: list[Problem]) -> ConfigError:
    in_order = sorted(problems, key=lambda problem: source.line(problem.place) or 0)
    lines = [
        source.where(problem.place)
        + ": ".join(filter(None, (write_place(problem.place), problem.message)))
        for problem in in_order
    ]
    if len(lines) == 1:
        return ConfigError(lines[0])
    listed = "".join(f"\n  {line}" for line in lines)
    return ConfigError(f"{source.label or 'configuration'}: {len(lines)} problems{listed}")


_UNKNOWN = ("extra_forbidden", "invalid_key")
_EXPECTED = {
    "string_type": "text",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
}


def problems_of(error: ValidationError, filling: EnvironmentFill) -> Iterator[Problem]:
    """Describe every error of a validation. A key that is missing where its place is taken by a wrong one is that
    mistake again, and left out."""
    found = error.errors(include_url=False)
    unknown = {details["loc"] for details in found if details["type"] in _UNKNOWN}
    for details in found:
        if details["type"] == CHAIN:
            yield from details["ctx"]["findings"]
        elif details["type"] != "missing" or not _stands_for(details["loc"], unknown):
            yield _problem(details, filling)


def _stands_for(missing: Place, unknown: Collection[Place]) -> bool:
    beside = [str(place[-1]) for place in unknown if place[:-1] == missing[:-1]]
    key = str(missing[-1])
    return any({key, other} == {"path", "url"} or hint_at(other, [key]) for other in beside)


def _problem(details: ErrorDetails, filling: EnvironmentFill) -> Problem:
    location, kind, context = details["loc"], details["type"], details.get("ctx", {})
    # Without the kind that pydantic inserts into the location of a field of a tier.
    place = (*location[:2], *location[3:]) if location[:1] == ("tiers",) else location
    original = filling.original(place)
    if kind == WRONG and original is None:
        return Problem(place=place, message=context["message"])
    if kind in _UNKNOWN:
        return Problem(place=place, message=hint_key(location))
    if kind == "missing":
        return Problem(place=place, message=f"missing; expected a value{example(location)}")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _wrong_kind((*place, "kind"), context.get("tag"), filling)
    shown = example_of(location, details["input"]) if original is None else example(location)
    expected = context.get("expected") or f"{_EXPECTED.get(kind, 'a value')}{shown}"
    return Problem(
        place=place,
        message=f"{_describe_value(details['input'], original)} does not fit; expected {expected}",
    )


def _describe_value(value: object, original: str | None) -> str:
    return show(value) if original is None else f"the value of {original}"


def _wrong_kind(place: Place, tag: object, filling: EnvironmentFill) -> Problem:
    expected = f"expected one of {', '.join(TierKind)}"
    if tag is None:
        return Problem(place=place, message=f"missing; {expected}")
    original = filling.original(place)
    near = hint_kind(str(tag)) if original is None else ""
    return Problem(
        place=place, message=f"{_describe_value(tag, original)} does not fit; {expected}{near}"
    )


# Hints: what was probably meant ----------------------------------------------------------------------


_KINDS = {
    TierKind.DEVICE: "gpu cuda hbm vram",
    TierKind.HOST: "ram memory cpu dram shm pinned",
    TierKind.PEER: "peers replica replicas neighbor neighbour nodes remote_memory",
    TierKind.FILE: "disk nvme ssd local folder dir directory posix pfs nfs lustre fs",
    TierKind.OBJECT: "s3 gs gcs az azure abfs minio http https bucket fsspec store",
}
"""What people call each kind of tier."""
_OPTIONS = {
    **{
        name: name
        for name in ("endpoint_url", "key", "secret", "token", "profile", "anon", "client_kwargs")
    },
    "endpoint": "endpoint_url",
    "access_key": "key",
    "secret_key": "secret",
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
}
"""Keys that people write beside an address, and the options of the store that they mean."""
_MAIN = {
    "interval": "every",
    "flush": "every",
    "compress": "codec",
    "retain": "last",
    "capture": "mode",
    "evict": "order",
    "drain": "deadline",
    "metrics": "prometheus",
}
"""The key that a value alone in place of a section stands for."""
_NAMES = ("codec", "mode", "order")
"""Those whose value is a name; that of the others begins with a digit."""
_REPLACED = {
    "parity": "; a peer tier keeps copies: write copies: N in its place, and any N nodes may be lost",
}
"""Of keys that tierfall had once: what to write instead."""
_NOT_OF_PEERS = {
    "retain": "; peer memory keeps the newest checkpoint that is whole, and the one that arrives: remove it",
    "evict": "; peer memory keeps the newest checkpoint alone: remove it",
    "capacity": "; an image that does not fit into the free memory of the node is refused: remove it",
    "compress": "; images are sent as they are: remove it",
    "read_bandwidth": "; only a start reads peer memory: remove it, or limit what is sent by bandwidth",
    "when_full": "; a save waits for peer memory as the host tier says: write it there",
    "shared": "; the nodes never share it, since each keeps other images: remove it",
    "read_only": "; each start fills peer memory anew: leave the tier out to do without it",
}
"""Of keys that a peer tier had once: why it has none."""


def hint_kind(word: str) -> str:
    """Return a hint at the kind of tier that was probably meant."""
    for kind, words in _KINDS.items():
        if word.lower() in words.split():
            return f'; did you mean "{kind}"?'
    return hint_at(word, TierKind)


def hint_key(location: Place) -> str:
    """Return what is wrong with a key that its section does not have, and where it belongs."""
    model, key = _model_at(location[:-1]), str(location[-1])
    known = list(fields_of(model))
    near = (
        (model is PeerTierConfig and _NOT_OF_PEERS.get(key))
        or _REPLACED.get(key)
        or _belongs(key, model)
        or hint_at(key, known)
        or f"; expected one of {', '.join(known)}"
    )
    kind = (
        f" of {with_article(str(location[2]))} tier"
        if len(location) == 4 and location[0] == "tiers"
        else ""
    )
    return f"unknown key{kind}{near}"


def _belongs(key: str, model: type[BaseModel]) -> str:
    """Return where a key belongs that this section lacks and another has, to append to a message; empty if none has."""
    inner = [name for name, field in fields_of(model).items() if key in _fields_in(field)]
    if inner:
        return f"; it belongs under {' or '.join(inner)}"
    if key == "path" and model is HostTierConfig:
        return "; write folder for the folder of its memory"
    kinds = [with_article(kind) for kind, tier in TIER_MODELS.items() if key in fields_of(tier)]
    if kinds and model in TIER_MODELS.values():
        other = (
            "; an address is given as url" if key == "path" and model is ObjectTierConfig else ""
        )
        if key == "url" and model is FileTierConfig:
            other = ": write kind: object, and no path"
        named = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        return f"; it is a key of {named} tier{other}"
    if key in _OPTIONS and model is ObjectTierConfig:
        return f"; it belongs under options: options: {{{_OPTIONS[key]}: ...}}"
    if kinds:
        return "; it is a key of a tier: write it in an entry of the list tiers"
    return "; it belongs at the top, beside run and tiers" if key in fields_of(Config) else ""


def example_of(location: Place, value: object) -> str:
    """Return `` such as`` and an example in place of a value that does not fit, made of that value where it can be."""
    if len(location) == 2 and location[0] == "tiers" and isinstance(value, str):
        return f": {_tier_of(value)}"
    if location and location[-1] == "on_signal" and isinstance(value, str):
        return f" such as [{value}]"
    main = _MAIN.get(str(location[-1])) if location else None
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    if plain and (main in _NAMES or (main is not None and str(value)[:1].isdigit())):
        return f": {{{main}: {value}}}"
    return example(location)


def _tier_of(text: str) -> str:
    if text in (TierKind.HOST, TierKind.DEVICE):
        return f"{{name: {text}, kind: {text}}}"
    if is_address(text):
        return '{name: store, kind: object, url: "..."}'  # it may have a secret in it
    return f"{{name: disk, kind: file, path: {text}}}"


def example(location: Place) -> str:
    """Return `` such as`` with the example of a field, or nothing if the model has none."""
    field = fields_of(_model_at(location[:-1])).get(str(location[-1])) if location else None
    if field is None or not field.examples:
        return ""
    return f" such as {_flow(field.examples[0])}"


def _fields_in(field: FieldInfo) -> Mapping[str, FieldInfo]:
    """Return the fields of the section that a field holds, if it holds one."""
    section = _section_in(field.annotation)
    return {} if section is None or section in TIER_MODELS.values() else fields_of(section)


def _flow(value: object) -> str:
    """Write a value in YAML's flow style."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000)
    return text.removesuffix("...\n").strip()


def _model_at(location: Place) -> type[BaseModel]:
    """Return the section that contains a location of pydantic's."""
    model: type[BaseModel] = Config
    if location[:1] == ("tiers",) and len(location) > 2:
        model, location = TIER_MODELS[str(location[2])], location[3:]
    for part in location:
        field = fields_of(model).get(str(part))
        model = (_section_in(field.annotation) if field else None) or model
    return model


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in get_args(annotation))
    return next((section for section in found if section is not None), None)
