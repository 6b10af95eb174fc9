"""The small words of messages."""

from __future__ import annotations

import pytest

from tierfall.core.types.text import with_article


@pytest.mark.parametrize(
    "said",
    ["an int", "a dict", "an object", "an OrderedDict", "a NoneType", "a uint8", "an Untyped"],
)
def test_the_article_suits_the_noun(said: str) -> None:
    assert with_article(said.split()[1]) == said
