"""The plan: everything that follows from a RunConfig, checked, priced and frozen.

    plan, types        the values that launcher and ranks read
    build              makes them from a derivation, in this order:
    dispatch_nodes     by how many nodes tokens go to experts; expert_dispatch: what the plan says of it
    sizes              the world and the batch; rampup: a batch that grows
    layout_choice      the layout, with split_options and auto_layout
    schedule_choice    the schedule, with schedule_search, schedule_file and extra_warmup
    stages             what each stage holds; sharing: what replicas divide
    memory, prices     what that costs, also from a measured profile, and what ranks send
    memory_limit       what fits a device, less what torch does not allocate
    violations         problems, with remedies that were tried; config_values: the config with its sources
    notes              lines on what the stages do: transformers' code, forwards alone, what waits on the host
    plan_picture       the plan as a picture
    parity, rehearsal  plans for `ppctl parity` and `ppctl rehearse`; rehearsal_result

Must not know torch, Hydra or processes.
"""

from ppctl.plan.build import build_plan, fits, plan_checked
from ppctl.plan.plan import Plan, RankPlan
from ppctl.plan.types import Derived, RankCost, StageSpec, TensorSpec

__all__ = ["Derived", "Plan", "RankCost", "RankPlan", "StageSpec", "TensorSpec", "build_plan", "fits", "plan_checked"]
