"""A run that starts from a directory that transformers wrote has transformers' loss and gradients, however cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hugging_face_models import DENSE, MOE, hugging_face_model, relative
from one_save import save_checkpoint
from oracle.data import whole_batches
from ranks import run_ranks
from transformers import AutoModelForCausalLM
from whole_tensors import whole_of

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.families.directory import open_directory
from ppctl.launch.weights import check_weights, model_values
from ppctl.model.loss import token_losses
from ppctl.model.stage_model import pieces
from ppctl.plan.build import build_plan
from ppctl.pretrained.hugging_face import DirectoryReader, export_checkpoint
from ppctl.train.session import build_session
from ppctl.train.snapshot import start_from
from ppctl.train.step import Trainer

SEQ, MICROBATCHES = 16, 4
CUTS = {"pp=1": (1, 1, "EttttL"), "pp=4 x vpp=2": (4, 2, "E|t|t||t|t||L")}
SAMPLE = {
    ("llama, tied", "pp=4 x vpp=2"),
    ("mixtral", "pp=1"),
    ("qwen3_moe", "pp=4 x vpp=2"),
    ("deepseek_v2, direct queries, yarn", "pp=4 x vpp=2"),
    ("deepseek_v3", "pp=4 x vpp=2"),
    ("glm4_moe", "pp=1"),
}
"""What `make test` runs; the grid is for `make test-all`."""
CASES = [
    pytest.param(name, cut, id=f"{name}, {cut}", marks=[] if (name, cut) in SAMPLE else [pytest.mark.whole])
    for name in {**DENSE, **MOE}
    for cut in CUTS
]


def config_of(directory: Path, text: Path, pp: int, vpp: int, layout: str, **sizes: int) -> RunConfig:
    config = RunConfig(model=ModelConfig(**model_values(str(directory)), from_=str(directory)))
    config.parallel.pipeline_model_parallel_size = pp
    config.parallel.virtual_pipeline_model_parallel_size = vpp
    config.parallel.pipeline_model_parallel_layout = layout
    config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm, config.parallel.batch_p2p_sync = (
        True,
        False,
        False,
    )
    config.data.path, config.data.seq_length = str(text), SEQ
    config.train.steps, config.train.micro_batch_size, config.train.global_batch_size = 1, 2, 2 * MICROBATCHES
    config.optim.clip_grad = 0.0
    for axis, size in sizes.items():
        setattr(config.parallel, f"{axis}_parallel_size", size)
    config.parallel.sequence_parallel = "tensor_model" in sizes
    ranks = pp * sizes.get("tensor_model", 1) * sizes.get("context", 1)
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cpu", 1, ranks
    return config


def loss_and_gradients(mapping: dict, save: Path | None = None) -> tuple[float, dict[str, torch.Tensor]]:
    """Runs in a rank: the loss of one step and this rank's gradients, each use of a tied tensor holding their sum.

    What ranks share is made whole. The weights that a run begins with are a checkpoint in `save`, where that is wanted.
    """
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    start_from(session, Path(str(config.model.from_)))
    if save is not None:
        save_checkpoint(session, save, 0, 0)
    loss = Trainer(session, session.data.batches()).step(0).record["loss"]
    experts = next(stage.experts for stage in session.model.stages.values())
    gradients = {
        piece: part.clone()
        for name, master in session.replica.weights.master.items()
        for piece, part in pieces(name, whole_of(session, name, master.grad), session.model.rows[name], experts)
    }
    return loss, gradients


@pytest.fixture(scope="module")
def case(request, tmp_path_factory, text):
    """The directory of a model, and what transformers computes with it: loss and gradients by canonical name."""
    directory = tmp_path_factory.mktemp("models")
    model = hugging_face_model(request.param, vocab_size=320)
    model.save_pretrained(directory / "weights")
    config = config_of(directory / "weights", text, *CUTS["pp=1"])
    check_weights(directory / "weights", config.model)
    batches = whole_batches(config).step(0)
    loss = 0.0
    for mb in range(MICROBATCHES):
        losses = token_losses(model(batches.tokens[mb]).logits, batches.labels[mb]) * batches.loss_mask[mb]
        share = losses.sum() / batches.total_tokens
        share.backward()
        loss += share.item()
    with torch.no_grad():  # saved as weights, gradients come back under canonical names
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(directory / "gradients")
    reader = DirectoryReader(open_directory(directory / "gradients"))
    trained = [name for name in reader.directory.names if not name.endswith("expert_bias")]
    return directory / "weights", loss, {name: reader.tensor(name) for name in trained}


@pytest.mark.parametrize(("case", "cut"), CASES, indirect=["case"])
def test_loss_and_every_gradient_equal_those_of_transformers(case, text, cut):
    directory, loss, gradients = case
    config = config_of(directory, text, *CUTS[cut])
    got = run_ranks(loss_and_gradients, CUTS[cut][0], to_mapping(config))
    seen = set()
    for rank_loss, rank_gradients in got:
        assert rank_loss == pytest.approx(loss, rel=1e-6)
        for name, gradient in rank_gradients.items():
            assert relative(gradient, gradients[name]) <= 1e-5, name
        seen |= rank_gradients.keys()
    assert seen == gradients.keys()


AXES = dict(tensor_model=2, context=2)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("case", "sizes"),
    [("llama", AXES), ("qwen3_moe", AXES | dict(expert_tensor=2)), ("deepseek_v3", AXES | dict(expert_tensor=2))],
    indirect=["case"],
    ids=["llama", "qwen3_moe", "deepseek_v3"],
)
def test_ranks_that_share_layers_sequences_and_experts_agree_with_transformers(case, text, sizes, tmp_path):
    """And what they save and export is, loaded again, what they read: to the bit."""
    directory, loss, gradients = case
    config = config_of(directory, text, *CUTS["pp=1"], **sizes)
    seen = set()
    for rank_loss, rank_gradients in run_ranks(loss_and_gradients, 4, to_mapping(config), tmp_path / "checkpoints"):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in rank_gradients.items():
            assert relative(gradient, gradients[name]) <= 1e-5, name
        seen |= rank_gradients.keys()
    assert seen == gradients.keys()
    export_checkpoint(tmp_path / "checkpoints" / "step-0", tmp_path / "exported", lambda *_: None)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (tmp_path / "exported", directory))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
