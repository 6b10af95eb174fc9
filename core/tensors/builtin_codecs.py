"""Codecs of values of the standard library, of enums, named tuples and dataclasses, and of numbers on a device. Nothing
is pickled.

The names begin with ``py:``. A class is found by module and qualified name among the modules that are imported
already: decoding imports nothing, and calls no ``__init__`` of a dataclass. The name of a class of the script that runs
also has the script's name, by which another program imports it: ``__main__:Progress:train``.
"""

from __future__ import annotations

import dataclasses
import sys
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag
from functools import cached_property, partial
from io import BytesIO
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from tierfall.core.types.errors import RestoreError

PREFIX = "py:"
_WORDS = {"enum": "an enum", "namedtuple": "a named tuple", "dataclass": "a dataclass"}
CLASSES = tuple(f"{PREFIX}{word}:" for word in _WORDS)
"""The beginnings of the names of codecs of a program's classes."""


class NotEncodableError(TypeError):
    """A value without a codec; the caller adds its path."""


@dataclass(frozen=True, slots=True)
class ValueCodec:
    """A conversion of values of one type to and from values that tierfall encodes."""

    type: type
    name: str
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]


@dataclass(frozen=True, slots=True)
class UnknownValue:
    """A saved value whose class this process cannot find, or has no codec for, in a dict that ``load`` returned.

    ``name`` is that of the class or codec. ``value`` is what was saved of it: of a dataclass a dict of its fields, of
    an enum the member's name, of a named tuple a tuple. ``reason`` says what is missing.
    """

    name: str
    value: Any
    reason: str = field(compare=False)
    codec: str = field(repr=False)

    def __hash__(self) -> int:
        return hash(self.codec)


@dataclass(frozen=True, slots=True)
class DeviceNumber:
    """A number that an object keeps on a device, as a 0-dim tensor. An image stores the tensor, so a save does not wait
    for the device. A restore and a load return a Python number."""

    tensor: Any


def codec_of(value: object) -> ValueCodec | None:
    """Return the codec of a value; None if it has none here. Raises NotEncodableError for a class that a restore could
    not find again."""
    kind = type(value)
    simple = _BY_TYPE.get(kind)
    if simple is not None:
        return simple
    if kind is deque:
        return _deque("" if value.maxlen is None else str(value.maxlen))  # type: ignore[attr-defined]
    if kind is defaultdict:
        return _defaultdict(_factory_name(value.default_factory))  # type: ignore[attr-defined]
    if kind is UnknownValue:
        return ValueCodec(kind, value.codec, lambda unknown: unknown.value, _same)  # type: ignore[attr-defined]
    word = _word_of(kind)
    return _of_class(word, kind) if word else None


def codec_named(name: str) -> ValueCodec | None:
    """Return the codec of a name; None if it is none of these, or of a class that is not imported."""
    if not name.startswith(PREFIX):
        return None
    kind, _, argument = name.removeprefix(PREFIX).partition(":")
    if name in _BY_NAME:
        return _BY_NAME[name]
    if kind == "deque" and argument.isdecimal():
        return _deque(argument)
    if kind == "defaultdict" and argument in _FACTORIES:
        return _defaultdict(argument)
    if kind in _WORDS:
        found = find_class(argument)
        return _of_class(kind, found) if found is not None and _word_of(found) == kind else None
    return None


def unknown_value(codec: str, value: object, reason: str = "") -> UnknownValue:
    """Return a placeholder for a value whose codec is not there, or has failed for ``reason``."""
    if not codec.startswith(CLASSES):
        reason = (
            reason or f"no codec is registered as {codec!r}: call tierfall.register_codec first"
        )
        return UnknownValue(codec, value, reason, codec)
    _, word, name = codec.split(":", 2)
    return UnknownValue(class_title(name), value, reason or not_found(name, _WORDS[word]), codec)


def not_found(name: str, what: str) -> str:
    """Return why a class is not found, which should be ``what``, and what to do."""
    title = class_title(name)
    module, _, script = f"{name}::".split(":")[:3]
    if not script and module in _MAINS:  # of a notebook
        return f"{title} is not there as {what}: import the class into the script that runs"
    return f"{title} is not there as {what}: import {script or module} first; for a command, name it in plugins"


# Values of the standard library ----------------------------------------------------------------------


def _encode_zone(zone: tzinfo | None) -> object:
    if zone is None:
        return None
    if type(zone) is timezone:
        return [zone.utcoffset(None).total_seconds(), zone.tzname(None)]
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    raise NotEncodableError(
        f"its time zone is a {type(zone).__qualname__}, not a timezone or a ZoneInfo"
    )


def _decode_zone(value: Any) -> tzinfo | None:
    if value is None:
        return None
    if isinstance(value, str):
        return ZoneInfo(value)
    seconds, name = value
    offset = timedelta(seconds=seconds)
    plain = timezone(offset)
    return plain if plain.tzname(None) == name else timezone(offset, name)


def _encode_time(value: datetime | time) -> object:
    return [value.replace(tzinfo=None).isoformat(), value.fold, _encode_zone(value.tzinfo)]


def _decode_time(kind: type[datetime] | type[time], value: Any) -> datetime | time:
    text, fold, zone = value
    return kind.fromisoformat(text).replace(fold=fold, tzinfo=_decode_zone(zone))


def _decode_file(value: Any) -> BytesIO:
    content, position = value
    file = BytesIO(content)
    file.seek(position)
    return file


def _simple(
    kind: type, encode: Callable[[Any], object], decode: Callable[[Any], object]
) -> ValueCodec:
    return ValueCodec(kind, f"{PREFIX}{kind.__name__}", encode, decode)


_FIXED = (
    _simple(complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    _simple(frozenset, set, frozenset),
    _simple(bytearray, bytes, bytearray),
    _simple(range, lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    _simple(Decimal, str, Decimal),
    _simple(UUID, str, UUID),
    _simple(SimpleNamespace, lambda v: dict(vars(v)), lambda v: SimpleNamespace(**v)),
    _simple(Namespace, lambda v: dict(vars(v)), lambda v: Namespace(**v)),
    _simple(BytesIO, lambda v: [v.getvalue(), v.tell()], _decode_file),
    _simple(type(Path()), str, Path),
    _simple(PurePosixPath, str, PurePosixPath),
    _simple(PureWindowsPath, str, PureWindowsPath),
    _simple(datetime, _encode_time, partial(_decode_time, datetime)),
    _simple(time, _encode_time, partial(_decode_time, time)),
    _simple(date, date.isoformat, date.fromisoformat),
    _simple(timedelta, lambda v: [v.days, v.seconds, v.microseconds], lambda v: timedelta(*v)),
    _simple(timezone, _encode_zone, _decode_zone),
    _simple(ZoneInfo, _encode_zone, _decode_zone),
    _simple(DeviceNumber, lambda v: v.tensor, lambda tensor: tensor.item()),
)
_BY_TYPE = {codec.type: codec for codec in _FIXED}
_BY_NAME = {codec.name: codec for codec in _FIXED}
_FACTORIES: dict[str, Callable[[], Any] | None] = {
    "": None,
    **{
        kind.__name__: kind
        for kind in (list, dict, set, tuple, int, float, bool, str, bytes, deque)
    },
}


def _deque(maxlen: str) -> ValueCodec:
    limit = int(maxlen) if maxlen else None
    return ValueCodec(deque, f"{PREFIX}deque:{maxlen}", list, lambda value: deque(value, limit))


def _factory_name(factory: Callable[[], Any] | None) -> str:
    for name, known in _FACTORIES.items():
        if known is factory:
            return name
    raise NotEncodableError(
        f"the default_factory of a defaultdict is {getattr(factory, '__qualname__', factory)}; it can be a built-in "
        "type such as list, or None"
    )


def _defaultdict(name: str) -> ValueCodec:
    factory = _FACTORIES[name]
    return ValueCodec(
        defaultdict, f"{PREFIX}defaultdict:{name}", dict, lambda value: defaultdict(factory, value)
    )


_BY_NAME[f"{PREFIX}deque:"] = _deque("")


# Classes of a program --------------------------------------------------------------------------------


def _is_named_tuple(kind: type) -> bool:
    return (
        issubclass(kind, tuple)
        and isinstance(getattr(kind, "_fields", None), tuple)
        and hasattr(kind, "_make")
    )


def _word_of(kind: type) -> str:
    """Return what kind of class it is; empty if its values have no codec."""
    if issubclass(kind, Enum):
        return "enum"
    if _is_named_tuple(kind):
        return "namedtuple"
    return "dataclass" if dataclasses.is_dataclass(kind) else ""


_MAINS = ("__main__", "__mp_main__")
"""The script of a process, and of one that multiprocessing has spawned."""


def is_of_script(kind: type) -> bool:
    """Return whether the script that runs defines a class, and not a module that others can import."""
    return kind.__module__ in _MAINS


def name_of_script() -> str:
    """Return the name by which another program imports the script that runs; empty in a notebook."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    name = spec.name if spec is not None else Path(file).stem if isinstance(file, str) else ""
    return "" if ":" in name else name


def class_name(kind: type) -> str:
    """Return the name of a class in a checkpoint: ``module:qualname``, of the script ``__main__:qualname:script``.

    Raises NotEncodableError for a class that is not found under its name.
    """
    module, qualname = kind.__module__, kind.__qualname__
    if _class_in(module, qualname) is not kind:
        raise NotEncodableError(
            f"{module}.{qualname} is not found under this name; define it at the top of a module"
        )
    if not is_of_script(kind):
        return f"{module}:{qualname}"
    script = name_of_script()
    return f"__main__:{qualname}:{script}" if script else f"__main__:{qualname}"


def class_title(name: str) -> str:
    """Return a class's name in a checkpoint for messages: ``module.qualname``."""
    module, qualname, script = f"{name}::".split(":")[:3]
    return f"{script or module}.{qualname}"


def find_class(name: str) -> type | None:
    """Return a class by its name in a checkpoint, among the imported modules, or None.

    One of a script is found in the module of the script's name, in the script that runs, or in the only module of that
    name within a package; one of a module also in the script that runs, if that has the module's name.
    """
    module, qualname, script = f"{name}::".split(":")[:3]
    places = [script, *_MAINS] if script else [module]
    if module not in _MAINS:
        places += _MAINS if module == name_of_script() else ()
    elif script == name_of_script():
        places.sort(key=_MAINS.__contains__, reverse=True)
    for each in places:
        found = _class_in(each, qualname)
        if found is not None:
            return found
    if not script:
        return None
    end = f".{script.rpartition('.')[2]}"
    moved = {_class_in(each, qualname) for each in [*sys.modules] if each.endswith(end)} - {None}
    return moved.pop() if len(moved) == 1 else None


def _class_in(module: str, qualname: str) -> type | None:
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        # No getattr: a module's own __getattr__ would run, and may import.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def _of_class(word: str, kind: type) -> ValueCodec:
    name = f"{PREFIX}{word}:{class_name(kind)}"
    functions: dict[str, tuple[Callable[[Any], object], Callable[..., object]]] = {
        "enum": (_encode_enum, _decode_enum),
        "namedtuple": (tuple, _decode_named_tuple),
        "dataclass": (_encode_dataclass, _decode_dataclass),
    }
    encode, decode = functions[word]
    return ValueCodec(kind, name, encode, partial(decode, kind))


def _same(value: Any) -> Any:
    return value


def _encode_enum(value: Enum) -> object:
    return value.value if isinstance(value, Flag) else value.name


def _decode_enum(kind: Any, value: Any) -> Enum:
    try:
        found: Enum = kind[value] if isinstance(value, str) else kind(value)
    except (KeyError, ValueError) as error:
        raise RestoreError(
            f"restore: {kind.__module__}.{kind.__qualname__} has no member {value!r} any more"
        ) from error
    return found


def _decode_named_tuple(kind: Any, value: Any) -> Any:
    if len(value) != len(kind._fields):
        raise RestoreError(
            f"restore: {kind.__module__}.{kind.__qualname__} has {len(kind._fields)} fields now, and the checkpoint "
            f"{len(value)}"
        )
    return kind._make(value)


def _encode_dataclass(value: Any) -> object:
    kind, fields = type(value), [field.name for field in dataclasses.fields(value)]
    others = [
        name
        for name in getattr(value, "__dict__", ())
        if name not in fields and not isinstance(getattr(kind, name, None), cached_property)
    ]
    if others:
        raise NotEncodableError(
            f"{kind.__qualname__} is a dataclass with attributes that are no fields: {', '.join(others)}"
        )
    return {name: getattr(value, name) for name in fields if hasattr(value, name)}


def _decode_dataclass(kind: Any, value: Any) -> Any:
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown, missing = [n for n in value if n not in known], [n for n in known if n not in value]
    made = object.__new__(kind)
    for name in missing:
        field = known[name]
        if field.default is not dataclasses.MISSING:
            value = {**value, name: field.default}
        elif field.default_factory is not dataclasses.MISSING:
            value = {**value, name: field.default_factory()}
        else:
            unknown.append(name)
    if unknown:
        raise RestoreError(
            f"restore: {kind.__module__}.{kind.__qualname__} has other fields now than in the checkpoint: "
            f"{', '.join(unknown)}"
        )
    for name, each in value.items():
        object.__setattr__(made, name, each)
    return made
