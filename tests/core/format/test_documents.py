"""Sealed documents: any changed byte is found, and one of a newer tierfall is refused with advice."""

from __future__ import annotations

import hashlib
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfall.core.format import documents
from tierfall.core.format.documents import Spliced, open_sealed, seal
from tierfall.core.types.errors import ConfigError, IntegrityError, NotSupportedError
from tierfall.core.types.text import float_to_json

MEMBERS = {"run": "gpt", "step": 400, "nested": {"a": [1, 2.5, None, True, 'ä\n"}']}, "empty": {}}

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def sealed_by_hand(body: str) -> bytes:
    """Seal text that need not be a document; written out here, so that it owes nothing to the code under test."""
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},"digest":"sha256:{digest}"}}\n'.encode()


def test_the_envelope_is_plain_json_that_other_tools_can_check() -> None:
    data = seal(MEMBERS)
    body, _, digest = data.rpartition(b',"digest":"sha256:')
    assert data.startswith(b'{"format":1,"requires":[],')
    assert digest == hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    assert list(json.loads(data)) == ["format", "requires", *MEMBERS, "digest"]


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text().filter(lambda name: name not in ("format", "requires", "digest")),
        json_values,
        max_size=5,
    )
)
def test_any_json_survives(members: dict[str, object]) -> None:
    document = open_sealed(seal(members), what="x")
    assert {name: document[name] for name in members} == members
    assert len(document) == len(members) + 3


def test_spliced_json_goes_in_as_it_is() -> None:
    spliced = Spliced(b'[ 1,   "two" ]')
    assert spliced in seal({"a": 1, "b": spliced})
    assert open_sealed(seal({"b": spliced}), what="x")["b"] == [1, "two"]


def test_a_thousand_flipped_bits_are_all_found() -> None:
    data = seal(MEMBERS)
    chance = random.Random(7)
    for _ in range(1000):
        damaged = bytearray(data)
        damaged[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        with pytest.raises(IntegrityError, match="commit of step 4"):
            open_sealed(bytes(damaged), what="commit of step 4")


def test_every_truncation_is_found() -> None:
    data = seal(MEMBERS)
    for length in range(len(data)):
        with pytest.raises(IntegrityError, match="truncated"):
            open_sealed(data[:length], what="x")


@pytest.mark.parametrize("extra", [b"\n", b" ", b"\0", b"}"])
def test_bytes_before_or_after_are_found(extra: bytes) -> None:
    for damaged in (seal(MEMBERS) + extra, extra + seal(MEMBERS), seal(MEMBERS) * 2):
        with pytest.raises(IntegrityError, match="x: its digest"):
            open_sealed(damaged, what="x")


@pytest.mark.parametrize(
    "body",
    [
        '{"format":2,"requires":[]',
        '{"format":"1","requires":[]',
        '{"format":null,"requires":[]',
        '{"requires":[]',
        '{"format":1,"requires":["delta"]',
        '{"format":1,"requires":null',
        '{"format":1',
    ],
)
def test_an_unknown_format_or_requirement_is_refused_with_what_to_do(body: str) -> None:
    with pytest.raises(
        NotSupportedError, match="install the tierfall that wrote it, or a newer"
    ) as caught:
        open_sealed(sealed_by_hand(body), what="nvme: commit.json")
    assert str(caught.value).startswith("nvme: commit.json: ")
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "body",
    [
        '{"format":1,"requires":[],"a":NaN',
        '{"format":1,"requires":[],"a":-Infinity',
        '{"format":1,"requires":[],"a":',
        '{"format":1,"requires":[],"a":' + "[" * 100_000,
        "[1",
        "",
    ],
)
def test_sealed_bytes_that_are_no_json_object_are_damage(body: str) -> None:
    with pytest.raises(IntegrityError, match="x: not JSON"):
        open_sealed(sealed_by_hand(body), what="x")


def test_more_bytes_than_any_document_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = seal(MEMBERS)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", len(data))
    assert open_sealed(data, what="x")
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", len(data) - 1)
    with pytest.raises(IntegrityError, match="more than any"):
        open_sealed(data, what="x")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_json_has_not_are_not_written_as_they_are(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        seal({"a": value})


@settings(max_examples=40, deadline=None)
@given(st.floats())
def test_a_float_survives_as_text_or_number(value: float) -> None:
    text = json.dumps(float_to_json(value), allow_nan=False)
    read = float(json.loads(text))
    assert math.isnan(read) if math.isnan(value) else read == value
