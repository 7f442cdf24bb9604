"""What is typed to give a run the model of a checkpoint: sizes, or the directory of a model with code of its own."""

import pytest

from ppctl.checkpoint.verification import with_sizes
from ppctl.errors import Problem

OWN = {"from_": None, "implementation": "auto", "transformers": None, "hf_overrides": {}, "num_layers": 8}
FOREIGN = OWN | {"from_": "/models/gemma", "transformers": {"version": 1}, "num_layers": 4}


@pytest.mark.parametrize(
    ("saved", "here", "remedy"),
    [
        (OWN, OWN | {"num_layers": 2}, "model.num_layers=8"),
        (OWN | {"from_": "/models/llama"}, OWN | {"num_layers": 2}, "model.num_layers=8"),
        (FOREIGN, OWN, "model.from=/models/gemma"),
        (
            FOREIGN | {"implementation": "transformers"},
            OWN,
            "model.from=/models/gemma model.implementation=transformers",
        ),
        (OWN, FOREIGN, "model.from=null model.num_layers=8"),
    ],
)
def test_a_misfit_is_answered_with_keys_that_can_be_typed(saved, here, remedy):
    (problem,) = with_sizes([Problem("PP-E502", "lacks tensors", "look")], saved, here)
    assert problem.remedy == remedy
