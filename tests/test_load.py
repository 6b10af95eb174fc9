"""``tierfall.load``: a checkpoint as a nested dict, from anything that points to it."""

from __future__ import annotations

import pytest

import tierfall
from tierfall.core.types.errors import ConfigError


@pytest.mark.parametrize("path", ["tiers://run/step-00000003", "tiers://run.yaml"])
def test_a_path_of_a_step_is_answered_with_what_loads_one(path: str) -> None:
    with pytest.raises(ConfigError, match=r"not saved or loaded by a path; .*TierReader"):
        tierfall.load(path)
