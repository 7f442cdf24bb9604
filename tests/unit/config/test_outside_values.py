"""What a model directory is asked with, before the keys that ask are known to be well typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ppctl.config.outside_values import take_model
from ppctl.errors import ConfigError, Problem


@pytest.mark.parametrize(
    ("given", "seen"), [({"a": None}, {"a": "null"}), (3, {}), (["a"], {}), ({"a": "1"}, {"a": "1"})]
)
def test_a_directory_is_asked_with_values_of_the_keys_types(given: Any, seen: dict[str, str]) -> None:
    values = {
        "model.from": "DIR",
        "model.implementation": "transformers",
        "model.lora": {},
        "model.hf_overrides": given,
    }
    draft: Any = SimpleNamespace(get=values.get, put=lambda *_: None, problems=[], provenance={})
    asked = []

    def read_model(*words: Any) -> Any:
        asked.append(words)
        raise ConfigError(Problem("PP-E520", "no such directory"))

    take_model(draft, set(), read_model, scaled=False, for_training=False)
    assert asked == [("DIR", "transformers", seen, {})]
