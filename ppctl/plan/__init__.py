"""The plan: everything that follows from a RunConfig, checked, priced and frozen.

`plan` and `types` hold what both towers read and `build` derives it. Its chapters: `sizes` (world and batch), `cut`
(the layout), `timing` (the schedule), `stages` (what each holds and costs), `fit` (memory). `values` is the config with
its sources, `violations` proves the advice, `encode` is the form of plan.json. Must not know torch, Hydra, files or
processes.
"""

from ppctl.plan.build import build_plan, plan_checked
from ppctl.plan.plan import Plan, RankPlan
from ppctl.plan.types import Derived, RankCost, StageSpec, TensorSpec

__all__ = ["Derived", "Plan", "RankCost", "RankPlan", "StageSpec", "TensorSpec", "build_plan", "plan_checked"]
