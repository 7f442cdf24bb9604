"""What Megatron's own classes and others' loops expect of the functions, with stand-ins that have their interface."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppctl import (
    backward_step,
    forward_backward_no_pipelining,
    forward_step_calc_loss,
    set_current_microbatch,
)
from ppctl.errors import TrainingError

CONFIG = SimpleNamespace()


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [([2.0, 5.0], 7.0), ([2.0, None], 2.0), ([None, 5.0], 6.0), ([None], 1.0), ([2.0], 2.0)],
    ids=["both", "first", "loss and second", "loss alone", "first alone"],
)
def test_an_output_without_a_gradient_adds_none_to_the_inputs(gradients, expected):
    """Megatron's backward starts from the first output alone: 2 of 7. The first without a gradient is the loss."""
    x = torch.zeros((), requires_grad=True)
    gradients = [None if g is None else torch.tensor(g) for g in gradients]
    assert backward_step([x], [x * 1, x * 1], gradients, CONFIG)[0].item() == expected


def test_an_output_without_a_gradient_that_is_no_loss_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TrainingError, match=r"PP-E714: .* shape \[2\]"):
        backward_step(x, x * 2, None, CONFIG)
    assert backward_step(None, torch.ones(2), None, CONFIG) is None, "of a frozen stage nothing is gone through"
    assert backward_step([x], [None, x * 2], [None, torch.ones(2)], CONFIG)[0].tolist() == [2.0, 2.0]


class AutoScaler:
    """Megatron's interface for a loss inside a layer; it keeps the first tensor and copies later ones into it."""

    def __init__(self):
        self.scale = None

    def set_loss_scale(self, scale):
        self.scale = scale if self.scale is None else self.scale.copy_(scale)


MOE, MTP = "num_moe_experts", "mtp_num_layers"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, None, None)),
        ({MOE: 8, MTP: 1}, (1.5, 0.5, None)),
        ({MOE: 8, MTP: 1, "calculate_per_token_loss": True}, (1, 1, None)),
        ({MOE: 8, MTP: 1, "grad_scale_func": lambda one: 8 * one}, (12, 4, None)),
        ({"experimental_attention_variant": "dsa"}, (None, None, 1.5)),
    ],
)
def test_megatrons_own_auxiliary_losses_are_scaled_where_they_are_loaded(monkeypatch, config, expected):
    """As Megatron's `forward_step` does: MoE's times the context parallel size (3), over the microbatches (2)."""
    moe, mtp, variant = (AutoScaler() for _ in range(3))
    homes = {"moe.moe_utils": ("MoEAuxLossAutoScaler", moe), "multi_token_prediction": ("MTPLossAutoScaler", mtp)}
    for home, (name, scaler) in homes.items():
        monkeypatch.setitem(sys.modules, f"megatron.core.transformer.{home}", SimpleNamespace(**{name: scaler}))
    config = SimpleNamespace(experimental_attention_variant_loss_scale_func=variant.set_loss_scale, **config)
    triple = torch.ones(()), torch.tensor(1), None
    for _ in range(2):
        forward_step_calc_loss(
            nn.Linear(2, 2), torch.ones(2), lambda output: triple, config, None, False, 2, [], 3, True
        )
    assert tuple(None if s.scale is None else s.scale.item() for s in (moe, mtp, variant)) == expected
    moe.scale = None
    with torch.no_grad():
        forward_step_calc_loss(
            nn.Linear(2, 2), torch.ones(2), lambda output: triple, config, None, False, 2, [], 3, True
        )
    assert moe.scale is None


def test_the_layers_of_multi_token_prediction_learn_their_microbatch_too():
    layers = [SimpleNamespace() for _ in range(2)]
    mtp = SimpleNamespace(layers=[SimpleNamespace(transformer_layer=layers[1])])
    set_current_microbatch(SimpleNamespace(decoder=SimpleNamespace(layers=layers[:1]), mtp=mtp), 3)
    assert [layer.current_microbatch for layer in layers] == [3, 3]


class Fused(torch.autograd.Function):
    """A linear map whose backward adds to the weight's main_grad and returns a dummy, as Megatron's fused product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(gradient.T @ x)
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


class Layers(nn.Module):
    def __init__(self, **config):
        super().__init__()
        torch.manual_seed(1)
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.config = SimpleNamespace(gradient_accumulation_fusion=bool(config), **config)

    def forward(self, x):
        fused = self.config.gradient_accumulation_fusion
        return (Fused.apply if fused else nn.functional.linear)(self.norm(x), self.linear.weight) + self.linear.bias


class DataParallel(nn.Module):
    """Megatron's DistributedDataParallel, as far as it moves gradients: a hook behind each accumulation."""

    def __init__(self, module, overlap):
        super().__init__()
        self.module, self.ready, self.accumulations = module, [], []
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(self.hook(parameter, overlap))
            self.accumulations.append(node)

    def hook(self, parameter, overlap):
        def move(*_):
            assert parameter.grad is not None or not overlap
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.ready.append(parameter)

        return move

    def forward(self, x):
        return self.module(x)


def trained(model):
    batches = iter(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2)))
    forward_backward_no_pipelining(
        forward_step_func=lambda iterator, module: (module(next(iterator)), lambda y: (y.square().sum(), None)),
        data_iterator=batches,
        model=model,
        num_microbatches=3,
        seq_length=1,
        micro_batch_size=5,
    )
    return model


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_data_parallelism_moves_are_left_to_it(overlap):
    """The fused product's dummy (NaN here) is added by nobody, and the hook of overlapping finds a gradient."""
    plain = trained(Layers())
    model = trained(DataParallel(Layers(overlap=overlap), overlap))
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is None and torch.equal(parameter.main_grad, expected.grad)
    assert len(model.ready) == 3 * 4
