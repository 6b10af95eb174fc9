"""Encoding of Python values as tagged JSON, without pickle, and the registry of users' codecs.

A JSON value is encoded as itself. Any other value, and a dict that would be ambiguous, is an object with the member
``%``. Large bytes, long strings, arrays and generator states are *blobs*: the image stores them as tensors, and the
value has a number that the caller resolves. Decoding expects hostile input: any defect is a ValueError, which callers
turn into an error that names the place. This module knows neither tensors nor paths.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import isclass
from typing import Any

import torch

from tierfall.core.tensors import builtin_codecs, dtypes, numpy_values
from tierfall.core.tensors.builtin_codecs import NotEncodableError, ValueCodec
from tierfall.core.types.errors import ConfigError, RestoreError
from tierfall.core.types.text import with_article

TAG = "%"
INT_LIMIT = 1 << 63
BLOB_BYTES = 64 << 10
DEPTH_MAX = 64

Coded = Any  # what json.dumps accepts


@dataclass(frozen=True, slots=True)
class Contents:
    """What the caller of ``decode`` provides: the content of blobs, by number, kind and members, and values of
    registered types, by name and encoded value. None stands in their place by default."""

    blob: Callable[[int, str, dict[str, Any]], object] = lambda number, kind, members: None
    registered: Callable[[str, object], object] = lambda name, value: None


# Process-wide, as register_codec is: a type has one codec in all states.
_BY_TYPE: dict[type, ValueCodec] = {}
_BY_NAME: dict[str, ValueCodec] = {}


def register_codec(
    type: type, name: str, encode: Callable[[Any], object], decode: Callable[[Any], object]
) -> None:
    """Register how values of exactly ``type`` are saved, under ``name``. Checkpoints with an earlier name of the type
    can still be restored.

    ``encode`` returns anything that a state may contain; ``decode`` receives that and returns the value. Raises
    ConfigError if the type is built in, the name belongs to another type, or an argument is invalid.
    """
    _check_codec(type, name, encode, decode)
    if type in MAPPINGS or type in _ATOMS or type in (list, tuple, set, torch.Tensor):
        raise ConfigError(f"register_codec: {type.__qualname__} has a codec of tierfall's own")
    if name.startswith(builtin_codecs.PREFIX):
        raise ConfigError(f"register_codec: names that begin with {name[:3]!r} are tierfall's own")
    known = _BY_NAME.get(name)
    if known is not None and known.type is not type:
        raise ConfigError(
            f"register_codec: the name {name!r} belongs to {known.type.__qualname__}; choose another"
        )
    _BY_TYPE[type] = _BY_NAME[name] = ValueCodec(type, name, encode, decode)


def _check_codec(type: object, name: object, encode: object, decode: object) -> None:
    if not isclass(type):
        raise ConfigError(f"register_codec: {type!r} is not a type; the type comes first")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"register_codec: {name!r} is not a name; expected text")
    for what, function in (("encode", encode), ("decode", decode)):
        if not callable(function):
            raise ConfigError(f"register_codec: {what} is {function!r}, which is not callable")


def codec_for(type: type) -> ValueCodec | None:
    return _BY_TYPE.get(type)


def codec_named(name: str) -> ValueCodec | None:
    """Return the codec of a name; None if it is not registered, or its class is not imported."""
    return _BY_NAME.get(name) or builtin_codecs.codec_named(name)


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """Keys or indices, and values, of a plain mapping, list or tuple; nothing for any other value."""
    if type(value) in MAPPINGS:
        pairs: Iterable[tuple[Any, Any]] = value.items()
        return pairs
    return enumerate(value) if type(value) is list or type(value) is tuple else ()


# ---- encoding


def encode_atom(value: object, depth: int = 0) -> Coded:
    """Encode a value without blobs: an atom, a tuple or set of such, or a value of a codec; with ``depth``, also lists
    and mappings. Raises NotEncodableError."""
    encode = _ATOMS.get(type(value))
    if encode is not None:
        return encode(value)
    if depth > DEPTH_MAX:
        raise NotEncodableError(f"it is nested deeper than {DEPTH_MAX} levels")
    if type(value) is tuple:
        return tagged("tuple", [encode_atom(v, depth + 1) for v in value])
    if type(value) is list and depth:  # what a codec has returned
        return [encode_atom(v, depth + 1) for v in value]
    if type(value) in MAPPINGS and depth:
        coded = [encode_atom(v, depth + 1) for v in value.values()]  # type: ignore[attr-defined]
        return encode_items(MAPPINGS[type(value)], list(value), coded)  # type: ignore[call-overload]
    if type(value) is set:
        # Sorted as text, so that equal sets give equal bytes in every process.
        return tagged("set", sorted((encode_atom(v, depth + 1) for v in value), key=json.dumps))
    scalar = numpy_values.encode_scalar(value)
    codec = None
    if scalar is None:
        codec = codec_for(type(value)) or builtin_codecs.codec_of(value)
    if codec is not None:
        coded = encode_atom(codec.encode(value), depth + 1)
        return {TAG: "codec", "n": codec.name, "v": coded}
    if scalar is None:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
        raise NotEncodableError(f"it is {with_article(name)}")
    return {TAG: "scalar", "d": scalar[0], "v": scalar[1]}


def tagged(tag: str, value: Coded) -> Coded:
    return {TAG: tag, "v": value}


def encode_run(values: Iterable[object]) -> list[Coded] | None:
    """Encode a list of only finite floats, or only machine integers, at once; None for any other list."""
    kinds = set(map(type, values))
    if kinds == {float} and all(map(math.isfinite, values)):  # type: ignore[arg-type]
        return list(values)
    if kinds == {int} and min(values) > -INT_LIMIT and max(values) < INT_LIMIT:  # type: ignore[type-var, operator]
        return list(values)
    return None


def encode_items(kind: str, keys: list[object], coded: list[Coded]) -> Coded:
    """Encode a mapping from its keys and its encoded values."""
    if kind == "dict" and set(map(type, keys)) <= {str} and TAG not in keys:
        return dict(zip(keys, coded, strict=True))
    return tagged(kind, [[encode_atom(k), v] for k, v in zip(keys, coded, strict=True)])


def _encode_int(value: int) -> Coded:
    return value if -INT_LIMIT < value < INT_LIMIT else tagged("int", hex(value))


def _encode_float(value: float) -> Coded:
    # As bits where JSON has no number: a NaN keeps its payload.
    return value if math.isfinite(value) else tagged("float", struct.pack(">d", value).hex())


def _same(value: Any) -> Any:
    return value


_ATOMS: dict[type, Callable[[Any], Coded]] = {
    type(None): _same,
    bool: _same,
    str: _same,
    int: _encode_int,
    float: _encode_float,
    bytes: lambda value: tagged("bytes", base64.b64encode(value).decode("ascii")),
    torch.dtype: lambda value: tagged("dtype", dtypes.name_of(value)),
    torch.Size: lambda value: tagged("size", list(value)),
    torch.device: lambda value: tagged("device", str(value)),
}

MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
MAPPING_TYPES: dict[str, Callable[[], dict[Any, Any]]] = {n: k for k, n in MAPPINGS.items()}


# ---- decoding


def decode(coded: Coded, contents: Contents, depth: int = 0) -> Any:
    """Decode a value; ValueError for JSON that no encoder writes."""
    if depth > 2 * DEPTH_MAX:
        raise ValueError("a value is nested too deeply")
    if isinstance(coded, list):
        return [decode(value, contents, depth + 1) for value in coded]
    if not isinstance(coded, dict):
        return coded
    if TAG not in coded:
        return {key: decode(value, contents, depth + 1) for key, value in coded.items()}
    tag = coded[TAG]
    decode_tagged = _TAGS.get(tag) if isinstance(tag, str) else None
    if decode_tagged is not None:
        return decode_tagged(_member(coded, "v", object))
    return _decode_nested(str(tag), coded, contents, depth)


def _decode_nested(tag: str, coded: dict[str, Any], contents: Contents, depth: int) -> Any:
    match tag:
        case "tuple":
            return tuple(decode(v, contents, depth + 1) for v in _member(coded, "v", list))
        case "set":
            return {hashable(decode(v, contents, depth + 1)) for v in _member(coded, "v", list)}
        case "dict" | "ordered" | "counter":
            return _decode_items(tag, _member(coded, "v", list), contents, depth)
        case "scalar":
            return numpy_values.decode_scalar(
                _member(coded, "d", str), bytes.fromhex(_member(coded, "v", str))
            )
        case "codec":
            value = decode(_member(coded, "v", object), contents, depth + 1)
            return contents.registered(_member(coded, "n", str), value)
        case "blob":
            return contents.blob(_member(coded, "t", int), _member(coded, "k", str), coded)
    raise ValueError(f"a value has the unknown tag {tag[:40]!r}")


def _decode_items(kind: str, items: list[Any], contents: Contents, depth: int) -> dict[Any, Any]:
    result = MAPPING_TYPES[kind]()
    for entry in items:
        if not isinstance(entry, list) or len(entry) != 2:
            raise ValueError("a mapping's entry is not a pair")
        result[decode_key(entry[0], contents)] = decode(entry[1], contents, depth + 1)
    return result


def decode_key(coded: Coded, contents: Contents | None = None) -> Any:
    """Decode a key of a mapping: hashable, and without blobs. Without ``contents`` an unknown type is an
    ``UnknownValue``."""
    if type(coded) is str:
        return coded
    registered = _decode_or_unknown if contents is None else contents.registered
    return hashable(decode(coded, Contents(_refuse_blob, registered)))


def _refuse_blob(number: int, kind: str, members: dict[str, Any]) -> object:
    raise ValueError("a key holds a blob")


def _decode_or_unknown(name: str, value: object) -> object:
    codec = codec_named(name)
    if codec is None:
        return builtin_codecs.unknown_value(name, value)
    try:
        return codec.decode(value)
    except RestoreError as error:
        return builtin_codecs.unknown_value(name, value, str(error))


def hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(f"a key or a member of a set cannot be hashed: {error}") from error
    return value


def _member(coded: dict[str, Any], name: str, kind: type) -> Any:
    if name not in coded or not isinstance(coded[name], kind) or isinstance(coded[name], bool):
        raise ValueError(f"a tagged value lacks its member {name!r}")
    return coded[name]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a tagged value is not a string")
    return value


def _decode_float(value: Any) -> float:
    data = bytes.fromhex(_text(value))
    if len(data) != 8:
        raise ValueError("a float is not 8 bytes")
    result: float = struct.unpack(">d", data)[0]
    return result


def _decode_dtype(value: Any) -> torch.dtype:
    dtype = dtypes.from_name(value)
    if dtype is None:
        raise ValueError(f"torch {torch.__version__} has no dtype {str(value)[:40]!r}")
    return dtype


def _decode_size(value: Any) -> torch.Size:
    if not isinstance(value, list) or not all(type(v) is int and abs(v) < INT_LIMIT for v in value):
        raise ValueError("a size is not a list of integers")
    return torch.Size(value)


def _decode_device(value: Any) -> torch.device:
    try:
        return torch.device(_text(value))
    except RuntimeError as error:
        raise ValueError(f"not a device: {str(value)[:40]!r}") from error


_TAGS: dict[str, Callable[[Any], Any]] = {
    "int": lambda value: int(_text(value), 16),
    "float": _decode_float,
    "bytes": lambda value: base64.b64decode(_text(value), validate=True),
    "dtype": _decode_dtype,
    "size": _decode_size,
    "device": _decode_device,
}
