"""Plans of typed values, for several test files."""

from __future__ import annotations

import pytest

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.plan import Plan, build_plan
from ppctl.plan.violations import ConfigValues


def config_values(**values: object) -> ConfigValues:
    """The defaults with `values` typed on the command line (aliases; `__` for a dot)."""
    return ConfigValues(RunConfig(), {}).overridden({key.replace("__", "."): value for key, value in values.items()})


def plan(**values: object) -> Plan:
    """The plan of the defaults with `values` typed on the command line."""
    made = config_values(**values)
    return build_plan(made.config, made.provenance)


def refusal(**values: object) -> list[str]:
    """The codes of the problems that leave no plan."""
    with pytest.raises(ConfigError) as error:
        plan(**values)
    return [problem.code for problem in error.value.problems]


def equation(made: Plan, key: str) -> str:
    """How a value was derived."""
    (found,) = [derived.equation for derived in made.derived if derived.key == key]
    return found
