"""Every recipe's plan, frozen: what changes a published job shows in the diff. `make golden` writes it anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ppctl.cli.plan_text import blocks
from ppctl.config.resources import recipes
from ppctl.launch.planning import planned

FROZEN = Path(__file__).parents[2] / "golden" / "recipes"
WIDTH = 160


@pytest.mark.parametrize("name", sorted(recipes()))
def test_a_recipes_plan_is_the_frozen_one(name: str) -> None:
    composed, plan, problems = planned([f"+recipe={name}"])
    assert composed is not None
    assert plan is not None
    assert not problems
    text = "\n\n".join(blocks(plan, composed.config, WIDTH)) + "\n"
    path = FROZEN / f"{name}.txt"
    if os.environ.get("PPCTL_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "read the difference; `make golden` freezes it"


@pytest.mark.parametrize("name", sorted(recipes()))
def test_no_line_of_a_plan_is_wider_than_a_terminal(name: str) -> None:
    composed, plan, _ = planned([f"+recipe={name}"])
    assert composed is not None and plan is not None
    for width in (80, 100, 120):
        lines = "\n".join(blocks(plan, composed.config, width)).splitlines()
        assert [line for line in lines if len(line) > width] == []


def test_nothing_else_is_frozen() -> None:
    assert {path.stem for path in FROZEN.iterdir()} == set(recipes())
