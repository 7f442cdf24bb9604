"""The plan: everything that follows from a RunConfig, checked, priced and frozen.

`plan` and `types` hold what both towers read, and `build` makes it from a `derivation`: `sizes` (world and batch; of
one that grows: `rampup`), `layout_choice`, `schedule_choice` (and `schedule_search`, where it is `auto`), `stages`
(what each holds). Then come `memory` and `prices` (what that costs), `memory_limit` (with `memory_reserve`: what of a
device is not a plan's) and `foreign_code` (what is said of transformers' code). `config_values` is the config with its
sources; `violations` finds remedies that work. Must not know torch, Hydra or processes.
"""

from ppctl.plan.build import build_plan, plan_checked
from ppctl.plan.plan import Plan, RankPlan
from ppctl.plan.types import Derived, RankCost, StageSpec, TensorSpec

__all__ = ["Derived", "Plan", "RankCost", "RankPlan", "StageSpec", "TensorSpec", "build_plan", "plan_checked"]
