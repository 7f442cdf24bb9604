"""The plan: everything that follows from a RunConfig, checked, priced and frozen.

    plan, types        the values that launcher and ranks read
    build              makes them from a derivation, in this order:
    dispatch_nodes     over how many nodes tokens go to experts; expert_dispatch: the plan's lines about this
    sizes              the world and the batch; rampup: a batch that grows
    layout_choice      the layout, with split_options; auto_layout searches one, with layout_scores
    schedule_choice    the schedule and its warm-up, with schedule_search and schedule_file
    stages             what each stage holds, and which part of it dp replicas divide among them
    memory, prices     the costs of stages, also from a measured profile, and what ranks send
    memory_limit       a device's limit, less the memory that torch does not allocate
    violations         the config with its sources, and problems with remedies that were tried
    plan_picture       the plan as a picture
    parity, rehearsal  plans and results of `ppctl parity` and `ppctl rehearse`

Must not know torch, Hydra or processes.
"""

from ppctl.plan.build import build_plan, plan_checked
from ppctl.plan.plan import Plan, RankPlan
from ppctl.plan.types import Derived, RankCost, StageSpec, TensorSpec

__all__ = ["Derived", "Plan", "RankCost", "RankPlan", "StageSpec", "TensorSpec", "build_plan", "plan_checked"]
