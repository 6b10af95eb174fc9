"""Hints of the errors of a configuration: what was probably meant, made of the model's own keys and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tierfall.config.fields import is_address, show
from tierfall.config.model import Config
from tierfall.config.source import Place
from tierfall.config.tiers import (
    TIER_MODELS,
    FileTierConfig,
    HostTierConfig,
    ObjectTierConfig,
)
from tierfall.core.types.text import hint_at, with_article
from tierfall.core.types.values import TierKind

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


def hint_kind(word: str) -> str:
    """Return a hint at the kind of tier that was probably meant."""
    for kind, words in _KINDS.items():
        if word.lower() in words.split():
            return f'; did you mean "{kind}"?'
    return hint_at(word, TierKind)


def hint_key(location: Place) -> str:
    """Return what is wrong with a key that its section does not have, and where it belongs."""
    model, key = _model_at(location[:-1]), str(location[-1])
    known = list(_fields(model))
    near = (
        _REPLACED.get(key)
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
    inner = [name for name, field in _fields(model).items() if key in _fields_in(field)]
    if inner:
        return f"; it belongs under {' or '.join(inner)}"
    if key == "path" and model is HostTierConfig:
        return "; write folder for the folder of its memory"
    kinds = [with_article(kind) for kind, tier in TIER_MODELS.items() if key in _fields(tier)]
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
    return "; it belongs at the top, beside run and tiers" if key in _fields(Config) else ""


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
    field = _fields(_model_at(location[:-1])).get(str(location[-1])) if location else None
    if field is None or not field.examples:
        return ""
    return f" such as {_flow(field.examples[0])}"


def _fields_in(field: FieldInfo) -> Mapping[str, FieldInfo]:
    """Return the fields of the section that a field holds, if it holds one."""
    section = _section_in(field.annotation)
    return {} if section is None or section in TIER_MODELS.values() else _fields(section)


def _flow(value: object) -> str:
    """Write a value in YAML's flow style."""
    match value:
        case bool():
            return show(value)
        case dict():
            return "{" + ", ".join(f"{key}: {_flow(inner)}" for key, inner in value.items()) + "}"
        case list():
            return "[" + ", ".join(_flow(inner) for inner in value) + "]"
        case _:
            return str(value)


def _model_at(location: Place) -> type[BaseModel]:
    """Return the section that contains a location of pydantic's."""
    model: type[BaseModel] = Config
    if location[:1] == ("tiers",) and len(location) > 2:
        model, location = TIER_MODELS[str(location[2])], location[3:]
    for part in location:
        field = _fields(model).get(str(part))
        model = (_section_in(field.annotation) if field else None) or model
    return model


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in YAML."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(inner) for inner in get_args(annotation))
    return next((section for section in found if section is not None), None)
