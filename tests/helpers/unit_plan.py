"""Plans of typed values, for several test files."""

from __future__ import annotations

import pytest

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.plan import Plan, build_plan
from ppctl.plan.said import Said


def plan(**values: object) -> Plan:
    """The plan of the defaults with `values` typed on the command line (aliases; `__` for a dot)."""
    said = Said(RunConfig(), {}).typed(tuple((key.replace("__", "."), value) for key, value in values.items()))
    return build_plan(said.config, dict(said.provenance))


def refusal(**values: object) -> list[str]:
    """The codes of the problems that leave no plan."""
    with pytest.raises(ConfigError) as error:
        plan(**values)
    return [problem.code for problem in error.value.problems]


def equation(made: Plan, key: str) -> str:
    """How a value was derived."""
    (found,) = [derived.equation for derived in made.derived if derived.key == key]
    return found
