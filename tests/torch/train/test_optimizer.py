"""AdamW's groups, the learning rate, and state that is known by canonical name."""

import pytest
import torch
from cuts import cut, tiny
from live_memory import LiveBytes
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppctl.config.learning_rate import lr_at
from ppctl.config.schema import OptimConfig
from ppctl.geometry.canonical_names import stage_parameters
from ppctl.model.stage import build_stage
from ppctl.train.grad_norm import GradientNorm, clip_gradients, locate_parameters
from ppctl.train.mixed_precision import LossScale, unscale
from ppctl.train.optimizer import AdamW
from ppctl.train.trained_weights import Weights


def masters(layout="EttttL", stage=0, **changes):
    model = tiny(**changes)
    spec = cut(layout, 1)[stage]
    return build_stage(spec, model, seed=5, dtype=torch.float32, device="cpu").canonical_parameters(), model


def rows(model):
    return stage_parameters(model, cut("EttttL", 1)[0].layers)


@pytest.mark.parametrize(
    ("changes", "spared"),
    [
        ({}, {"tok_embeddings.weight"}),
        ({"share_embeddings_and_output_weights": True}, {"tok_embeddings.weight", "output.weight"}),
        ({"add_qkv_bias": True, "qk_layernorm": True}, {"tok_embeddings.weight"}),
    ],
)
def test_matrices_decay_and_norms_biases_and_embeddings_do_not(changes, spared):
    own, model = masters(**changes)
    optimizer = AdamW(own, OptimConfig(weight_decay=0.3), rows(model))
    decay = {name: weight_decay for names, weight_decay in optimizer.groups for name in names}
    assert len(decay) == len(own)
    for name in own:
        exempt = name in spared or name.endswith(".bias") or "norm" in name
        assert decay[name] == (0.0 if exempt else 0.3), name


def step_once(own, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in own.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_steps_equal_those_of_torchs_own_optimizer_made_from_scratch():
    own, model = masters()
    twin, _ = masters()
    optim = OptimConfig(lr=1e-2, weight_decay=0.1)
    ours = AdamW(own, optim, rows(model))
    decayed = [p for n, p in twin.items() if p.dim() > 1 and n != "tok_embeddings.weight"]
    rest = [p for n, p in twin.items() if not (p.dim() > 1 and n != "tok_embeddings.weight")]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95)
    )
    for step in range(3):
        lr = lr_at(step, optim, 3)
        ours.lr = lr
        for group in theirs.param_groups:
            group["lr"] = lr
        step_once(own, ours, step)
        step_once(twin, theirs, step)
    for name in own:
        assert torch.equal(own[name], twin[name]), name


def test_state_moves_by_name_into_another_cut_and_training_continues_bitwise():
    whole, model = masters()
    optim = OptimConfig(lr=1e-2)
    optimizer = AdamW(whole, optim, rows(model))
    for seed in range(2):
        step_once(whole, optimizer, seed)
    saved = {n: {k: t.clone() for k, t in s.items()} for n, s in optimizer.state.items()}
    assert {key for state in saved.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}

    part, _ = masters("Ett|ttL", stage=1)
    resumed = AdamW(part, optim, rows(model))
    with torch.no_grad():
        for name, parameter in part.items():
            parameter.copy_(whole[name])
            for key, tensor in resumed.state[name].items():
                tensor.copy_(saved[name][key])
    gradients = {name: torch.randn_like(p) for name, p in whole.items()}
    for own, opt in ((whole, optimizer), (part, resumed)):
        for name, parameter in own.items():
            parameter.grad = gradients[name]
        opt.step()
    for name in part:
        assert torch.equal(part[name], whole[name]), name
    assert resumed.state["norm.weight"]["step"].item() == 3


def test_a_checkpoint_can_be_read_into_the_state_in_place_before_the_first_step():
    own, model = masters()
    optimizer = AdamW(own, OptimConfig(), rows(model))
    optimizer.state["norm.weight"]["exp_avg"].fill_(7)
    assert optimizer.state["norm.weight"]["exp_avg"].eq(7).all()
    step_once(own, optimizer, 0)
    assert optimizer.state["norm.weight"]["exp_avg"].mean() > 5


def test_a_rank_without_parameters_has_an_optimizer_whose_step_does_nothing():
    optimizer = AdamW({}, OptimConfig(), rows(tiny()))
    optimizer.lr = 0.5
    optimizer.step()
    assert optimizer.state == {}


def test_a_lone_vector_is_spared():
    own = {"norm.weight": nn.Parameter(torch.ones(3))}
    optimizer = AdamW(own, OptimConfig(lr=1.0, weight_decay=0.5), rows(tiny()))
    own["norm.weight"].grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(own["norm.weight"], torch.ones(3))


def test_a_parameter_without_a_gradient_in_a_step_keeps_its_own_count_of_updates():
    own, model = masters()
    twin, _ = masters()
    optim = OptimConfig(lr=1e-2, weight_decay=0.0)
    ours = AdamW(own, optim, rows(model))
    theirs = torch.optim.AdamW(twin.values(), lr=1e-2, betas=(optim.beta1, optim.beta2), weight_decay=0.0)
    missed = "layers.1.attention.wo.weight"
    for step in range(3):
        for name in own:
            gradient = torch.randn(own[name].shape, generator=torch.Generator().manual_seed(step))
            own[name].grad = twin[name].grad = None if name == missed and step == 1 else gradient
        ours.step()
        theirs.step()
    assert all(torch.equal(own[name], twin[name]) for name in own)
    assert {name: entry["step"].item() for name, entry in ours.state.items()} == dict.fromkeys(own, 3) | {missed: 2}
    assert ours.updates == 3


def test_a_step_that_the_device_leaves_out_changes_nothing_and_does_not_count():
    """The fused kernel, which CPUs have as well, looks at the scalar; the host is told later."""
    twins = []
    for left_out in ((0.0, 1.0, 0.0), (0.0, 0.0)):
        own, model = masters()
        optimizer = AdamW(own, OptimConfig(lr=1e-2), rows(model))
        optimizer.fused = True
        for step, out in enumerate(left_out):
            for parameter in own.values():
                parameter.grad = torch.full_like(parameter, float("nan") if out else 0.1 + step // (len(left_out) - 1))
            optimizer.step(torch.tensor(out))
            if out:
                optimizer.take_back()
        twins.append((own, optimizer))
    (own, optimizer), (twin, expected) = twins
    assert optimizer.updates == expected.updates == 2
    for name in own:
        assert torch.equal(own[name], twin[name])
        assert all(torch.equal(optimizer.state[name][key], expected.state[name][key]) for key in optimizer.state[name])


class Called(TorchDispatchMode):
    """The names of the operations that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_device_an_update_makes_no_tensor_of_a_parameters_size_and_the_host_does_not_wait(dtype):
    """On meta tensors: a device that is not the CPU, and whose values the host cannot read."""
    model, spec = tiny(), cut("EttttL", 1)[0]
    stage = build_stage(spec, model, seed=5, dtype=dtype, device="cpu").to("meta")
    weights = Weights(stage.canonical_parameters())
    optimizer = AdamW(weights.master, OptimConfig(), rows(model))
    norms = GradientNorm(locate_parameters([spec], model), device="meta")
    for parameter in weights.master.values():
        parameter.grad = torch.zeros_like(parameter)
    for updates in (1, 2):
        with LiveBytes() as live, Called() as called:
            unscale(weights.master, LossScale.of(OptimConfig()))
            norm = norms.measure(weights.master)
            clip_gradients(weights.master, norm, 1.0)
            optimizer.step()
            weights.publish()
        assert called.names.count("_fused_adamw_") == 2
        assert live.peak <= 16 * len(weights.master)  # a few numbers for each
        assert optimizer.updates == updates
    assert {entry["step"].device.type for entry in optimizer.state.values()} == {"cpu"}


def test_the_fused_kernel_moves_parameters_as_the_default_does():
    own, model = masters()
    twin, _ = masters()
    ours, theirs = (AdamW(each, OptimConfig(lr=1e-2), rows(model)) for each in (own, twin))
    assert not ours.fused
    ours.fused = True  # torch has the kernel for the CPU as well
    for step in range(3):
        step_once(own, ours, step)
        step_once(twin, theirs, step)
    for name in own:
        assert torch.allclose(own[name], twin[name], rtol=1e-5, atol=1e-6), name
        assert torch.equal(ours.state[name]["step"], theirs.state[name]["step"])
