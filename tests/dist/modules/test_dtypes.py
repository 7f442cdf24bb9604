"""What travels has the dtype in which stages compute: under a policy of fully_shard, autocast, or as asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from own_modules import PARTS, WIDTH, Net, batches, made
from ranks import run_ranks
from torch import Tensor, nn

import ppctl
from ppctl.errors import PpctlError

ROWS, SIZE, BF16 = 8, 2, torch.bfloat16


class Bare(nn.Module):
    """A linear in front of the cut, without a residual: autocast decides what travels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)))


class CastsItself(Bare):
    """Its own forward switches autocast on."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return super().forward(x)


BARE = [["a"], ["norm", "b"]]


def mean_square(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.mse_loss(output.float(), labels)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, WIDTH, generator=generator)


def sent_by(pipeline: ppctl.Pipeline) -> set[torch.dtype]:
    return {edge.dtype for known in pipeline._known.values() for edge in known.crossing.edges}


# --- policies of fully_shard ----------------------------------------------------------------------------------------


def sharded(layers_too: bool, result: torch.dtype | None) -> tuple[float | None, dict[str, Tensor], set[torch.dtype]]:
    """A step's loss, gradients made whole, and what travels, with the usual policy on GPUs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32, output_dtype=result)

    def shard(stage: nn.Module) -> None:
        for name, module in stage.named_modules():
            if layers_too and name in ("model.layers.0", "model.layers.1"):
                fully_shard(module, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)

    config = ppctl.PipelineConfig(module_fqns_per_model_part=PARTS[2], pp_microbatch_size=SIZE)
    pipeline = ppctl.pipeline(made("plain"), config, group=mesh["pp"].get_group(), parallelize=shard)
    batch = batches(2, ROWS)[mesh["dp"].get_local_rank()]
    pipeline.eval(batch)
    loss = pipeline.step(batch)
    gradients = {name: parameter.grad.full_tensor() for name, parameter in pipeline.named_parameters()}
    return None if loss is None else float(loss), gradients, sent_by(pipeline)


@pytest.mark.parametrize(("layers_too", "result"), [(False, None), (True, None), (False, torch.float32)])
def test_stages_with_a_policys_dtype_send_it_and_train(layers_too: bool, result: torch.dtype | None) -> None:
    found = run_ranks(sharded, 4, layers_too, result)
    assert all(sent == {result or BF16} for _, _, sent in found)
    losses, gradients = [], {}
    for tokens, labels in batches(2, ROWS):
        model = made("plain").to(BF16)
        share = torch.zeros(())
        for part, wanted in zip(tokens.split(SIZE), labels.split(SIZE), strict=True):
            logits = model(part).to(result or BF16)
            share = share + nn.functional.cross_entropy(logits.float().flatten(0, 1), wanted.flatten(), reduction="sum")
        loss = share / (labels != -100).sum()
        loss.backward()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad.float() / 2
    assert [loss for loss, _, _ in found if loss is not None] == pytest.approx(losses, rel=2e-3)
    for _, own, _ in found:
        for name, gradient in own.items():  # the two sum microbatches in float32 and in bfloat16
            assert torch.allclose(gradient, gradients[name], rtol=0.05, atol=2e-3), name


# --- autocast ---------------------------------------------------------------------------------------------------------


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(4)
    return {"bare": Bare, "casts itself": CastsItself}[kind]()


def under_autocast(kind: str) -> tuple[dict[str, Tensor], float | None, list[set[torch.dtype]], str]:
    config = ppctl.PipelineConfig(module_fqns_per_model_part=BARE, pp_microbatch_size=SIZE, loss_fn=mean_square)
    pipeline, refused = ppctl.pipeline(model_of(kind), config), ""
    with torch.autocast("cpu", BF16, enabled=kind == "bare"):
        loss = pipeline.step(rows())
    sent = [sent_by(pipeline)]
    gradients = {name: parameter.grad.clone() for name, parameter in pipeline.named_parameters()}
    pipeline.step(rows())  # of the same shape, and without autocast: other messages
    sent.append(sent_by(pipeline))
    try:
        with torch.autocast("cpu", BF16, enabled=pipeline.info.has_first_stage):
            pipeline.step(rows())
    except PpctlError as error:
        refused = error.problems[0].message
    pipeline.close()
    return gradients, None if loss is None else loss.item(), sent, refused


@pytest.mark.parametrize("kind", ["bare", "casts itself"])
def test_autocast_decides_what_travels_with_the_bits_of_one_process(kind: str) -> None:
    model = model_of(kind)
    inputs, labels = rows()
    shares = []
    for part, wanted in zip(inputs.split(SIZE), labels.split(SIZE), strict=True):
        with torch.autocast("cpu", BF16, enabled=kind == "bare"):
            shares.append(mean_square(model(part), wanted))
        shares[-1].backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    (first, none, sent, refused), (last, loss, _, same) = run_ranks(under_autocast, 2, kind)
    assert none is None and loss == torch.stack([each.detach() for each in shares]).sum().item()
    assert all(torch.equal(gradient, whole[name]) for name, gradient in (first | last).items())
    assert (first | last).keys() == whole.keys()
    assert sent == [{BF16}, {BF16, torch.float32} if kind == "bare" else {BF16}]
    assert refused == same and "under autocast to bfloat16" in refused and "rank 1 a step of" in refused


# --- as asked for -----------------------------------------------------------------------------------------------------


def asked(dtype: Any) -> tuple[dict[str, Tensor], Tensor | None, list[torch.dtype]]:
    config = ppctl.PipelineConfig(module_fqns_per_model_part=PARTS[2], pp_microbatch_size=SIZE, dtype=dtype)
    pipeline, seen = ppctl.pipeline(made("plain"), config), list[torch.dtype]()
    pipeline.parts[0].register_forward_pre_hook(lambda _, given: seen.append(getattr(given[0], "dtype", None)))
    loss = pipeline.step(batches(1, ROWS)[0])
    return {name: p.grad for name, p in pipeline.named_parameters()}, loss, seen


class Rounds(torch.autograd.Function):
    """A cut whose messages are rounded, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(BF16).float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to(BF16).float()


@pytest.mark.parametrize("dtype", [BF16, "bfloat16"])
def test_messages_travel_in_the_dtype_that_is_asked_for(dtype: Any) -> None:
    (first, _, _), (last, loss, seen) = run_ranks(asked, 2, dtype)
    assert seen == [torch.float32] * (ROWS // SIZE)  # what a module gets is what it was made for
    model = made("plain")
    model.layers[1].register_forward_pre_hook(lambda _, given: (Rounds.apply(given[0]), *given[1:]))
    (tokens, labels), share = batches(1, ROWS)[0], torch.zeros(())
    for part, wanted in zip(tokens.split(SIZE), labels.split(SIZE), strict=True):
        total = (labels != -100).sum()
        loss_of = nn.functional.cross_entropy(model(part).flatten(0, 1), wanted.flatten(), reduction="sum") / total
        loss_of.backward()
        share = share + loss_of.detach()
    assert loss is not None and torch.allclose(loss, share, rtol=0, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose((first | last)[name], parameter.grad, rtol=0, atol=1e-6), name


def casts_in_secret(stage: nn.Module) -> None:
    stage.register_forward_hook(lambda _, given, output: output.to(BF16))


def on_two_ranks() -> str:
    config = ppctl.PipelineConfig(module_fqns_per_model_part=PARTS[2])
    pipeline = ppctl.pipeline(Net(), config, parallelize=casts_in_secret)
    try:
        pipeline._dry_pass(pipeline._begin(batches(1, 2)[0]))  # as before the first step on a GPU: nobody waits
    except Exception as error:
        return str(error)
    return ""


def test_a_dtype_that_nobody_could_foresee_is_named_with_a_remedy() -> None:
    first, _ = run_ranks(on_two_ranks, 2)
    assert first.startswith("PP-E557: pp_rank 0") and "stage 0 returns torch.bfloat16" in first
    assert "return x.to(torch.float32)" in first
    config = ppctl.PipelineConfig(module_fqns_per_model_part=[[*PARTS[2][0], *PARTS[2][1]]], dtype="bfloat")
    with pytest.raises(PpctlError, match="PP-E130: dtype='bfloat' is no floating dtype"):
        ppctl.pipeline(Net(), config)
