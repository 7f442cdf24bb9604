"""Weight gradients in float32 accumulators, and the output layer's put off: the same bits, later."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppctl import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from ppctl.engine.engine_error import EngineError
from ppctl.errors import ConfigError, TrainingError
from ppctl.megatron.call import Call, CallOnRank
from ppctl.megatron.wgrad import split_products
from ppctl.weight_gradients.functions import split_backward

M, B, S, H, V = 5, 2, 3, 8, 11


class Model(nn.Module):
    """A layer and an output layer."""

    def __init__(self, dtype=torch.float32, bias=True, **config):
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(H, H, dtype=dtype)
        self.output_layer = nn.Linear(H, V, bias=bias, dtype=dtype)
        self.config = SimpleNamespace(gradient_accumulation_fusion=True, **config)

    def forward(self, x):
        return self.output_layer(torch.tanh(self.layer(x)))


def batches(dtype=torch.float32):
    return [torch.randn(S, B, H, generator=torch.Generator().manual_seed(mb)).to(dtype) for mb in range(M)]


def forward(iterator, model):
    return model(next(iterator)), lambda output: (output.float().square().mean(), None)


def run(model, step=forward, dtype=torch.float32, **more):
    forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(batches(dtype)),
        model=model,
        num_microbatches=M,
        seq_length=S,
        micro_batch_size=B,
        **more,
    )


def plain(model, dtype=torch.float32):
    """The gradients of a plain loop, accumulated in float32, microbatch by microbatch."""
    sums = {}
    for x in batches(dtype):
        (model(x).float().square().mean() / M).backward()
        for name, p in model.named_parameters():
            sums[name] = p.grad.float() if name not in sums else sums[name] + p.grad.float()
            p.grad = None
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_added_to_main_grad_in_float32_and_grad_stays_empty(dtype):
    model = Model(dtype)
    expected = plain(Model(dtype), dtype)
    run(model, dtype=dtype)
    for name, parameter in model.named_parameters():
        assert parameter.grad is None
        assert parameter.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        if dtype != torch.float64:
            assert torch.equal(parameter.main_grad, expected[name])


def test_main_grad_lives_until_its_owner_clears_it():
    model = Model()
    run(model)
    once = model.layer.weight.main_grad.clone()
    run(model)
    assert torch.allclose(model.layer.weight.main_grad, 2 * once)
    for parameter in model.parameters():
        parameter.main_grad.zero_()
    buffer = model.layer.weight.main_grad
    run(model)
    assert model.layer.weight.main_grad is buffer and torch.equal(buffer, once)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 3, M, M + 1])
def test_what_is_put_off_is_finished_before_finalizing_with_the_same_bits(limit, bias):
    seen = []

    def finalize(models, tokens, pg_collection):
        seen.append(models[0].output_layer.weight.main_grad.clone())

    model = Model(
        bias=bias, defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit, finalize_model_grads_func=finalize
    )
    run(model)
    expected = plain(Model(bias=bias))
    assert torch.equal(seen[0], expected["output_layer.weight"])
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and torch.equal(parameter.main_grad, expected[name])
    assert not {"embedding_activation_buffer", "grad_output_buffer"} & vars(model).keys()
    assert "forward" not in vars(model.output_layer)


@pytest.mark.parametrize(("limit", "deferred"), [(0, M), (2, 2), (M + 3, M)])
def test_as_many_products_are_put_off_as_the_limit_says(limit, deferred):
    held = []

    def step(iterator, model):
        output, loss_func = forward(iterator, model)
        held.append(len(model.embedding_activation_buffer))
        return output, loss_func

    model = Model(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=limit)
    model.layer.weight.register_post_accumulate_grad_hook(lambda p: held.append(len(model.embedding_activation_buffer)))
    run(model, step)
    assert max(held) == deferred


def test_an_exception_leaves_the_output_layer_as_it_was():
    def step(iterator, model):
        raise KeyError

    model = Model(defer_embedding_wgrad_compute=True)
    with pytest.raises(EngineError):
        run(model, step)
    assert "forward" not in vars(model.output_layer) and not hasattr(model, "grad_output_buffer")


def test_forward_only_puts_nothing_off():
    model = Model(defer_embedding_wgrad_compute=True)
    run(model, forward_only=True)
    assert not hasattr(model.layer.weight, "main_grad")


class OwnBuffers(Model):
    """As Megatron's: the model fills the buffers by itself."""

    def __init__(self, **config):
        super().__init__(bias=False, **config)
        self.embedding_activation_buffer = ["stray"]
        self.grad_output_buffer = ["stray"]

    def forward(self, x):
        hidden = torch.tanh(self.layer(x))
        output = nn.functional.linear(hidden, self.output_layer.weight.detach())
        self.embedding_activation_buffer.append(hidden.detach())
        output.register_hook(self.grad_output_buffer.append)
        return output


def test_a_model_that_fills_the_buffers_itself_is_cleared_and_finished():
    model = OwnBuffers(defer_embedding_wgrad_compute=True)
    run(model)
    assert torch.equal(model.output_layer.weight.main_grad, plain(Model(bias=False))["output_layer.weight"])
    assert model.embedding_activation_buffer == model.grad_output_buffer == []


def test_the_two_functions_by_themselves():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True)
    model = Model()
    assert clear_embedding_activation_buffer(config, [nn.Linear(1, 1), model], True) is model
    assert clear_embedding_activation_buffer(config, model, False) is None
    assert clear_embedding_activation_buffer(SimpleNamespace(), model, True) is None
    activations, gradients = [torch.randn(S, B, H) for _ in range(2)], [torch.randn(S, B, V) for _ in range(2)]
    model.embedding_activation_buffer += activations
    model.grad_output_buffer += gradients
    finish_embedding_wgrad_compute(config, model, False, None)
    assert len(model.grad_output_buffer) == 2
    finish_embedding_wgrad_compute(config, model, True, None)
    expected = sum(g.flatten(0, 1).T @ x.flatten(0, 1) for g, x in zip(gradients, activations, strict=True))
    assert torch.allclose(model.output_layer.weight.main_grad, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "output_layer"), "Model has no output_layer"),
        (lambda model: setattr(model, "output_layer", nn.Identity()), "output_layer is a Identity"),
    ],
)
def test_a_model_without_an_output_layer_is_told(change, message):
    model = Model(defer_embedding_wgrad_compute=True)
    change(model)
    with pytest.raises(ConfigError, match=message):
        run(model)


def test_a_split_sequence_is_refused():
    config = SimpleNamespace(defer_embedding_wgrad_compute=True, sequence_parallel=True)
    with pytest.raises(TrainingError, match="PP-E727"):
        finish_embedding_wgrad_compute(config, Model(), True, SimpleNamespace(size=lambda: 2))


def test_a_split_sequence_is_refused_on_every_rank_before_anything_runs():
    model = Model(defer_embedding_wgrad_compute=True, sequence_parallel=True)
    groups = SimpleNamespace(tp=SimpleNamespace(size=lambda: 2), pp=None, cp=None)
    row = SimpleNamespace(placement=SimpleNamespace(num_stages=2, stages_of=lambda rank: (rank,)))
    call = Call(forward, [None], [model], model.config, M, (S, B, None), False, False, None, groups, None)
    for pp_rank in (0, 1):
        with pytest.raises(ConfigError, match="PP-E727"):
            CallOnRank(call, row, pp_rank, None, {}, None).run(None)


def test_without_pipelining_it_is_the_same():
    model = Model(defer_embedding_wgrad_compute=True)
    forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=iter(batches()),
        model=model,
        num_microbatches=M,
        seq_length=S,
        micro_batch_size=B,
    )
    expected = plain(Model())
    assert all(torch.equal(p.main_grad, expected[name]) for name, p in model.named_parameters())


def test_a_function_gets_megatrons_rule_unless_it_has_one_of_its_own(monkeypatch):
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x @ weight

    class GroupedGemm(Mine):
        pass

    split_backward(Mine, weights=("weight",))
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", SimpleNamespace(GroupedGemm=GroupedGemm))
    rules = []
    for _ in range(2):
        split_products([])
        rules.append(vars(GroupedGemm)["apply"])
    assert rules[0] is rules[1] is not vars(Mine)["apply"]
