"""A stage of a model of transformers, from its StageSpec and the value that describes the model.

Knows how a description becomes modules with initial weights. Must not know files, ranks or what is trained.
"""

from __future__ import annotations

import torch

from ppctl.config.schema import ModelConfig
from ppctl.foreign.library import config_from, make_model
from ppctl.foreign.stage import ForeignStage
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.geometry.foreign_model import ForeignModel
from ppctl.geometry.parts import WHOLE, Parts
from ppctl.model.initialize import Initialize, initial_value, initialize
from ppctl.plan import StageSpec


def build_foreign_stage(
    spec: StageSpec,
    model: ModelConfig,
    foreign: ForeignModel,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
    parts: Parts = WHOLE,
    initialize: Initialize = initialize,
) -> ForeignStage:
    """Build a stage on meta, give what it owns memory on `device` in `dtype`, and let `initialize` fill it.

    Raises LookupError where the installed transformers builds other parameters than the description says.
    """
    stage = ForeignStage(
        make_model(config_from(foreign.config), "meta", dtype).train(), foreign.anatomy, spec.layers, device
    )
    rows = {row.name: row for row in stage.parameter_rows().values()}
    expected = stage_parameters(model, spec.layers)
    built, described = ({name: row.shape for name, row in each.items()} for each in (rows, expected))
    wrong = sorted(name for name in built | described if built.get(name) != described.get(name))
    if wrong:
        message = f"this transformers builds other parameters than {foreign.transformers}, which described the model"
        raise LookupError(f"{message}: {', '.join(wrong[:5])}")
    initialize(stage.canonical_parameters(), model, seed, parts)
    with torch.no_grad():
        for name, buffer in stage.canonical_buffers().items():
            buffer.copy_(initial_value(name, model, seed))
    return stage
