"""What a model directory is asked with, before the keys that ask are known to be well typed."""

from __future__ import annotations

from typing import Any

import pytest

from ppctl.config import draft as layers
from ppctl.config.draft import Draft
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem


@pytest.mark.parametrize(
    ("given", "seen"), [({"a": None}, {"a": "null"}), (3, {}), (["a"], {}), ({"a": "1"}, {"a": "1"})]
)
def test_a_directory_is_asked_with_values_of_the_keys_types(given: Any, seen: dict[str, str]) -> None:
    draft = Draft.of(RunConfig(), {}, [])
    draft.values |= {"model.from": "DIR", "model.implementation": "transformers", "model.hf_overrides": given}
    asked = []

    def read_model(*words: Any) -> Any:
        asked.append(words)
        raise ConfigError(Problem("PP-E520", "no such directory"))

    layers.model(draft, read_model, scaled=False, for_training=False)
    assert asked == [("DIR", "transformers", seen, {})]
