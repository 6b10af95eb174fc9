"""Sizes, rates, times and shares: read exactly, refused with the nearest right unit, and written for people."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.types import units
from tierfall.core.types.errors import ConfigError
from tierfall.core.types.units import (
    format_duration,
    parse_duration,
    parse_rate,
    parse_share,
    parse_size,
    parse_size_with_unit,
)

BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
DECIMAL = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("4KiB", 4096),
        ("16GiB", 17179869184),
        ("500MB", 500_000_000),
        ("1.5 GiB", 1610612736),
        (" 2 kB ", 2000),
        ("0.1kB", 100),
        ("8191PiB", 8191 * 2**50),
    ],
)
def test_sizes(text: int | str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes
    assert isinstance(parse_size(text), int)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("500MB/s", 500_000_000), ("2 GiB/s", 2**31), (7, 7), ("7", 7)]
)
def test_rates(text: int | str, bytes_per_s: int) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30),
        ("10m", 600),
        ("4h", 14400),
        ("30d", 2592000),
        (5, 5),
        (0.5, 0.5),
        ("1.5h", 5400),
    ],
)
def test_times(text: int | str, seconds: float) -> None:
    assert parse_duration(text) == seconds
    assert isinstance(parse_duration(text), float)


@pytest.mark.parametrize(("text", "share"), [("3.5%", 0.035), ("100%", 1.0), ("0 %", 0.0)])
def test_shares(text: str, share: float) -> None:
    assert parse_share(text) == share


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 999), st.sampled_from(sorted(BINARY | DECIMAL)))
def test_a_size_is_exact_to_the_nearest_byte(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * (BINARY | DECIMAL)[unit]
    text = f"{whole}.{thousandths:03d}{unit}"
    if exact >= 2**63:
        with pytest.raises(ConfigError, match="more than any storage"):
            parse_size(text)
    else:
        assert abs(parse_size(text) - exact) <= Fraction(1, 2)


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        (parse_size, "16GIB", ["GiB"]),
        (parse_size, "16gib", ["GiB"]),
        (parse_size, "16Gb", ["GB"]),
        (parse_size, "16G", ["GiB", "GB"]),
        (parse_size, "16g", ["GiB", "GB"]),
        (parse_size, "16GiBs", ["GiB"]),
        (parse_size, "500MB/s", ["MB"]),
        (parse_rate, "500MB", ["MB/s"]),
        (parse_rate, "500MBps", ["MB/s"]),
        (parse_rate, "500mb/s", ["MB/s"]),
        (parse_duration, "10min", ["m"]),
        (parse_duration, "10 Minutes", ["m"]),
        (parse_duration, "3hours", ["h"]),
        (parse_duration, "30S", ["s"]),
    ],
)
def test_a_wrong_unit_names_the_nearest_right_one(parse, text: str, meant: list[str]) -> None:
    with pytest.raises(ConfigError, match="unknown unit") as caught:
        parse(text)
    hint = re.search(r"did you mean (.*)\?", str(caught.value))
    assert hint is not None
    assert hint[1] == " or ".join(f'"{unit}"' for unit in meant)
    assert "such as" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "-1",
        "-1GiB",
        "+1",
        "1,5GiB",
        "0x10",
        "1_000",
        "16 zorks",
        "1 2GiB",
        "٣GiB",
        "1e9",
        ".5GiB",
        "9" * 400,
    ],
)
def test_text_that_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="16GiB"):
        parse_size(text)


@pytest.mark.parametrize("value", [True, None, -1, 1.5, [], 2**63, float("nan")])
def test_values_that_are_no_size_are_refused(value) -> None:
    with pytest.raises(ConfigError, match="such as 16GiB"):
        parse_size(value)


@pytest.mark.parametrize(
    "value", [True, None, -1, -0.5, float("inf"), float("nan"), "3w", "400000000d"]
)
def test_values_that_are_no_time_are_refused(value) -> None:
    with pytest.raises(ConfigError, match="such as 250ms"):
        parse_duration(value)


@pytest.mark.parametrize("value", ["3.5", "3.5 percent", "101%", "-1%", 0.035, 101, -1, "%"])
def test_values_that_are_no_share_are_refused(value) -> None:
    with pytest.raises(ConfigError, match=r"such as 3\.5%"):
        parse_share(value)


def test_a_number_without_a_percent_sign_is_answered_by_the_share_that_was_meant() -> None:
    for value, meant in ((0.05, "5%"), (1.0, "100%"), (3, "3%"), (3.5, "3.5%")):
        with pytest.raises(ConfigError, match=f"such as {re.escape(meant)}$"):
            parse_share(value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("1h30m", "90m"), ("1m30s", "90s"), ("2d 12h", "60h"), ("1s 500ms", "1500ms")],
)
def test_a_time_of_two_units_is_answered_by_one_of_one(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"expected one: {meant}$"):
        parse_duration(text)
    assert parse_duration(meant) > 0


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("100Mbit/s", "12.5MB/s"),
        ("10 Gbps", "1.25GB/s"),
        ("1Gb/s", "0.125GB/s"),
        ("80kbit/s", "10kB/s"),
    ],
)
def test_a_rate_in_bits_is_answered_in_bytes(text: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"counts bits; expected bytes per second: {meant}$"):
        parse_rate(text)
    assert parse_rate(meant) > 0


@pytest.mark.parametrize(
    ("pattern", "parse", "units_known"),
    [
        (units.SIZE_PATTERN, parse_size, ["", *units.SIZE_UNITS]),
        (units.RATE_PATTERN, parse_rate, list(units.RATE_UNITS)),
        (units.DURATION_PATTERN, parse_duration, ["", *units.DURATION_UNITS]),
        (units.SHARE_PATTERN, parse_share, ["%"]),
    ],
)
def test_the_schemas_pattern_allows_what_is_read(pattern: str, parse, units_known) -> None:
    for unit in units_known:
        parse(f"2{unit}")
        assert re.search(pattern, f"2{unit}"), unit
    for text in ("2zorks", "2gib", "-2", "", "2GiB/min"):
        assert not re.search(pattern, text), text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.00035, "0.35 ms"),
        (0.012, "12 ms"),
        (0.9996, "1 s"),
        (2.44, "2.4 s"),
        (42, "42 s"),
        (59.96, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599.7, "1 h 00 min"),
        (3840, "1 h 04 min"),
        (86399, "1 d 00 h"),
        (183600, "2 d 03 h"),
        (-0.012, "-12 ms"),
    ],
)
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("value", [0, 16, "16", "512", "0.5KiB"])
def test_a_size_whose_unit_was_forgotten_is_refused(value: int | str) -> None:
    with pytest.raises(
        ConfigError, match=r"is \d+ bytes, less than 1KiB; expected a size such as 16GiB"
    ):
        parse_size_with_unit(value)
    assert parse_size_with_unit("1KiB") == 1024
    assert parse_size_with_unit(65536) == 65536
