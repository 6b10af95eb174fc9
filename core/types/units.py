"""Parsing and formatting of sizes (bytes), rates (bytes/s), times (seconds) and shares (fractions).

Parsing is exact and strict: ``Gb`` is refused, and the error suggests the nearest unit. Formatting is for people:
rounded, with a space before the unit.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TypeVar

from tierfall.core.types.errors import ConfigError

SIZE_UNITS: Mapping[str, int] = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
RATE_UNITS: Mapping[str, int] = {f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()}
DURATION_UNITS: Mapping[str, Decimal] = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}
NUMBER_PATTERN = r"[0-9]{1,18}(\.[0-9]{1,9})?"
SIZE_PATTERN = rf"^{NUMBER_PATTERN} ?([kKMGTP]?B|[KMGTP]iB)?$"
RATE_PATTERN = rf"^([0-9]{{1,18}}|{NUMBER_PATTERN} ?([kKMGTP]?B|[KMGTP]iB)/s)$"
DURATION_PATTERN = rf"^{NUMBER_PATTERN} ?(ms|s|m|h|d)?$"
SHARE_PATTERN = rf"^{NUMBER_PATTERN} ?%$"

EXPECTED_SIZE = "a size such as 16GiB, 500MB or 4KiB, or a whole number of bytes"
EXPECTED_RATE = "a rate such as 500MB/s or 2GiB/s, or a whole number of bytes per second"
EXPECTED_DURATION = "a time such as 250ms, 30s, 10m, 4h or 30d, or a number of seconds"
EXPECTED_SHARE = "a share such as 3.5%"

N = TypeVar("N", int, Decimal)

_NUMBER_AND_UNIT = re.compile(rf"({NUMBER_PATTERN})\s*([^0-9.\s].*)?", re.DOTALL)
_MAX_BYTES = (1 << 63) - 1
_MAX_SECONDS = 10**10
_UNIT_WORDS = {  # units that people write, and that an error can suggest a correction for
    "sec": "s",
    "secs": "s",
    "second": "s",
    "seconds": "s",
    "min": "m",
    "mins": "m",
    "minute": "m",
    "minutes": "m",
    "hr": "h",
    "hrs": "h",
    "hour": "h",
    "hours": "h",
    "day": "d",
    "days": "d",
    **{
        f"{word}byte{plural}": unit
        for word, unit in {"": "B", "kilo": "kB", "mega": "MB", "giga": "GB", "tera": "TB"}.items()
        for plural in ("", "s")
    },
}
_BITS = re.compile(r"([kKmMgGtT]?)(?:bits?/s|bits?ps|bps)|([kMGT])b/s")
_PARTS = re.compile(rf"(?:{NUMBER_PATTERN} ?(?:ms|s|m|h|d) ?){{2,}}")

FOREVER_S = 1e9
"""The longest wait: system calls bound their timeouts."""


def parse_size(value: int | str) -> int:
    """Parse a size to bytes; an integer, or text without a unit, is in bytes. Raises ConfigError."""
    number, unit = _split(value, EXPECTED_SIZE)
    return _whole_bytes(value, number, _factor(unit or "B", SIZE_UNITS, EXPECTED_SIZE))


def parse_size_with_unit(value: int | str) -> int:
    """Parse a size, and refuse one of less than 1 KiB: its unit was forgotten. Raises ConfigError."""
    size_bytes = parse_size(value)
    if size_bytes < 1024:
        raise ConfigError(
            f"{value!r} is {size_bytes} bytes, less than 1KiB; expected {EXPECTED_SIZE}"
        )
    return size_bytes


def parse_rate(value: int | str) -> int:
    """Parse a rate to bytes per second; an integer is in bytes per second. Raises ConfigError."""
    number, unit = _split(value, EXPECTED_RATE)
    if unit not in RATE_UNITS and (bits := _BITS.fullmatch(unit)):
        scale = (bits[1] or bits[2] or "").upper().replace("K", "k")
        raise ConfigError(
            f"{value!r} counts bits; expected bytes per second: {(number / 8).normalize():f}{scale}B/s"
        )
    if unit == "" and isinstance(value, str) and not value.strip().isdigit():
        raise ConfigError(f"{value!r} has no unit; expected {EXPECTED_RATE}")
    return _whole_bytes(value, number, _factor(unit or "B/s", RATE_UNITS, EXPECTED_RATE))


def parse_positive_rate(value: int | str) -> int:
    """Parse a rate above 0 to bytes per second. Raises ConfigError."""
    bytes_per_s = parse_rate(value)
    if bytes_per_s == 0:
        raise ConfigError(f"0 bytes per second is not a rate; expected {EXPECTED_RATE}")
    return bytes_per_s


def parse_duration(value: float | str) -> float:
    """Parse a time to seconds; a number, or text without a unit, is in seconds. Raises ConfigError."""
    if isinstance(value, float) and math.isfinite(value) and value >= 0:
        value = f"{value:.9f}"
    if isinstance(value, str) and _PARTS.fullmatch(value.strip()):
        total = sum(
            Decimal(number) * DURATION_UNITS[unit]
            for number, _, unit in re.findall(rf"({NUMBER_PATTERN}) ?(ms|s|m|h|d)", value)
        )
        raise ConfigError(f"{value!r} has two units; expected one: {format_period(float(total))}")
    number, unit = _split(value, EXPECTED_DURATION)
    seconds = number * _factor(unit or "s", DURATION_UNITS, EXPECTED_DURATION)
    if seconds > _MAX_SECONDS:
        raise ConfigError(f"{value!r} is more than 300 years; expected {EXPECTED_DURATION}")
    return float(seconds)


def _is_duration(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(DURATION_PATTERN, value) is not None


def as_seconds(value: float | None, *, what: str) -> float | None:
    """Validate an argument in seconds (None: no bound), at most FOREVER_S. Raises ConfigError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        meant = f": expected {parse_duration(value):g}" if _is_duration(value) else ""
        raise ConfigError(
            f"{what} must be a number of seconds of at least 0, or None, not {value!r}{meant}"
        )
    return min(float(value), FOREVER_S)


def parse_share(value: float | str) -> float:
    """Parse a percentage to a fraction between 0 and 1. Raises ConfigError."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 100:
        percent = value * 100 if isinstance(value, float) and value <= 1 else value
        raise ConfigError(f"{value!r} is not a share; expected a share such as {percent:g}%")
    number, unit = _split(value, EXPECTED_SHARE)
    if unit != "%":
        raise ConfigError(
            f'{value!r} is not a share: write "%" after it; expected {EXPECTED_SHARE}'
        )
    if number > 100:
        raise ConfigError(f"{value!r} is more than the whole; expected {EXPECTED_SHARE}")
    return float(number / 100)


def parse_overhead(value: float | str) -> float:
    """Parse the share of training time that saving may cost. Raises ConfigError."""
    share = parse_share(value)
    if not 0 < share < 1:
        why = " leaves no time to train" if share else " is never spent"
        raise ConfigError(f'"{value}"{why}; expected more than 0% and less than 100%, such as 3.5%')
    return share


def _split(value: object, expected: str) -> tuple[Decimal, str]:
    """Split into a non-negative number and a unit ('' if there is none)."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{value!r} is not usable here; expected {expected}")
    if isinstance(value, int):
        if not 0 <= value <= _MAX_BYTES:
            raise ConfigError(f"{value} is out of range; expected {expected}")
        return Decimal(value), ""
    match = _NUMBER_AND_UNIT.fullmatch(value.strip())
    if match is None:
        fault = "negative" if value.strip()[:1] == "-" else "not a number with a unit"
        raise ConfigError(f"{value!r} is {fault}; expected {expected}")
    return Decimal(match[1]), match[3] or ""


def _factor(unit: str, units: Mapping[str, N], expected: str) -> N:
    factor = units.get(unit)
    if factor is None:
        near = " or ".join(f'"{name}"' for name in nearest_units(unit, units))
        hint = f" (did you mean {near}?)" if near else ""
        raise ConfigError(f'unknown unit "{unit}"{hint}; expected {expected}')
    return factor


def nearest_units(unit: str, units: Iterable[str]) -> list[str]:
    """At most two units that ``unit`` may stand for, the likeliest first."""
    known = list(units)
    if (word := _UNIT_WORDS.get(unit.lower())) in known:
        return [word]
    folded = unit.lower().replace("ps", "/s")
    same = [name for name in known if name.lower() == folded]
    # "16G": binary first, since memory and chunks are counted so.
    longer = [name for name in reversed(known) if folded and name.lower().startswith(folded)]
    close = difflib.get_close_matches(unit, known, n=1, cutoff=0.5)
    return (same or longer or close)[:2]


def _whole_bytes(value: object, number: Decimal, factor: int) -> int:
    count = int((number * factor).to_integral_value())
    if count > _MAX_BYTES:
        raise ConfigError(f"{value!r} is more than any storage holds; expected at most 8191PiB")
    return count


def format_size(size_bytes: float) -> str:
    """Format a size: ``1.5 GiB``, ``512 B``."""
    return _scaled(size_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in powers of ten, as vendors and networks do: ``2.4 GB/s``."""
    return _scaled(bytes_per_s, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"))


def format_count(count: float) -> str:
    """Format a count that need not be whole: ``0.05``, ``2.9``, ``2,880``."""
    if abs(count) < 999.5:
        return _short(count)
    return f"{round(count, 2 - math.floor(math.log10(abs(count)))):,.0f}"


def format_share(fraction: float) -> str:
    """Format a fraction as a percentage: ``3.5%``."""
    return f"{_short(fraction * 100)}%"


def format_duration(seconds: float) -> str:
    """Format a finite time in its two largest units: ``12 ms``, ``4.2 s``, ``1 h 04 min``, ``2 d 03 h``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return "0 s" if seconds == 0 else f"{_short(seconds * 1000)} ms"
    if seconds < 59.95:
        return f"{_short(seconds)} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_period(seconds: float) -> str:
    """Format a time exactly, as in a configuration, in the largest unit that divides it: ``1d``, ``36h``, ``0.5s``."""
    exact = Decimal(str(seconds))
    for unit, factor in reversed(list(DURATION_UNITS.items())):
        if exact >= factor and exact % factor == 0:
            return f"{int(exact / factor)}{unit}"
    return f"{exact.normalize():f}s"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """Format in the smallest unit in which the rounded number is below ``base``."""
    scaled, last = float(value), len(units) - 1
    for index, unit in enumerate(units):
        if index == last or round(abs(scaled)) < base:
            return f"{_short(scaled)} {unit}"
        scaled /= base
    raise AssertionError("there is always a last unit")


def _short(value: float) -> str:
    """Format with two to three significant digits, without trailing zeros."""
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 0.95 else 2
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
