"""The forward-backward functions on one rank: what they leave alone, what they call, and what they refuse."""

import copy
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppctl import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from ppctl.engine.engine_error import EngineError
from ppctl.errors import ConfigError

M = 3
ONE_CHUNK = [forward_backward_no_pipelining, forward_backward_pipelining_without_interleaving]
EVERY = [*ONE_CHUNK, forward_backward_pipelining_with_interleaving]


class Model(nn.Module):
    """A stage that multiplies by its weight."""

    def __init__(self, config, weight=2.0):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), weight))
        self.config = config
        self.input = None

    def set_input_tensor(self, tensors):
        (self.input,) = tensors

    def forward(self, x):
        return (x if self.input is None else self.input) * self.weight


class Syncs:
    """A config's functions, written down."""

    def __init__(self, **more):
        self.events = []
        self.open = 0
        fields = {
            "no_sync_func": self.no_sync,
            "finalize_model_grads_func": self.finalize,
            "hidden_size": 2,
            "pipeline_dtype": torch.float32,
            "calculate_per_token_loss": False,
        }
        self.config = SimpleNamespace(**fields | more)

    @contextmanager
    def no_sync(self):
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def finalize(self, models, tokens, **more):
        self.events.append((len(models), tokens, more))


def forward(iterator, model, *flag):
    def loss_func(output):
        loss = output.sum()
        return loss, loss.item()

    return model(next(iterator)), loss_func


def inputs():
    return iter([torch.full((1, 1, 2), float(mb + 1)) for mb in range(M)])


def run(function, config, step=forward, own=None, **more):
    """A step on one chunk. Returns (store, model)."""
    model = Model(config) if own is None else own
    listed = function is forward_backward_pipelining_with_interleaving
    arguments = {
        "forward_step_func": step,
        "data_iterator": [inputs()] if listed else inputs(),
        "model": [model] if listed else model,
        "num_microbatches": M,
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    return function(**arguments | more), model


class Attached(torch.autograd.Function):
    """Hands a tensor on, and gives a loss beside the way the gradient of the scale that its module was told."""

    @staticmethod
    def forward(ctx, x, loss, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, ctx.module.scale.squeeze(), None


class Balanced(nn.Module):
    """A part of a user's model with a loss of its own, told its scale by the name of its kind."""

    def __init__(self, kind):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 3.0]))
        setattr(self, f"set_{kind}_loss_scale", self.take)

    def take(self, scale):
        self.scale = scale

    def loss(self, x):
        return (self.weight * x).square().mean()

    def forward(self, x):
        return Attached.apply(x * self.weight, self.loss(x), self)


class Routed(Model):
    def __init__(self, config):
        super().__init__(config)
        self.moe, self.mtp = Balanced("moe"), Balanced("mtp")

    def forward(self, x):
        return self.mtp(self.moe(super().forward(x)))


@pytest.mark.parametrize("scale", [None, lambda loss: 8 * loss])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("function", EVERY)
def test_losses_of_modules_weigh_as_if_they_were_added_to_the_models(function, per_token, scale):
    """Against a plain loop over the microbatches with one sum of losses."""

    def step(iterator, model, *flag):
        def loss_func(output):
            return output.sum(), 1, None

        return model(next(iterator)), loss_func

    config = Syncs(
        num_moe_experts=4, mtp_num_layers=1, grad_scale_func=scale, calculate_per_token_loss=per_token
    ).config
    _, model = run(function, config, step, own=Routed(config))
    plain = Routed(config)
    for x in inputs():
        x = x * plain.weight
        own = plain.moe.loss(x)
        x = x * plain.moe.weight
        loss = (x * plain.mtp.weight).sum() + own + plain.mtp.loss(x)
        (loss * (8 if scale else 1) / (1 if per_token else M)).backward()
    for (name, mine), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-6, atol=0, msg=name)


@pytest.mark.shows("parallel.finalize_model_grads_func")
@pytest.mark.parametrize("function", EVERY)
def test_a_step_stores_finalizes_and_leaves_the_config_alone(function):
    syncs = Syncs()
    before = copy.copy(vars(syncs.config))
    store, model = run(function, syncs.config, pg_collection="groups")
    assert store == [4.0, 8.0, 12.0]
    assert model.weight.grad.tolist() == [2.0, 2.0]
    assert syncs.events == [(1, None, {"pg_collection": "groups"})]
    assert syncs.open == 0 and vars(syncs.config) == before


@pytest.mark.parametrize("function", EVERY)
def test_forward_only_has_no_gradients_no_finalizing_and_leaves_no_sync(function):
    syncs = Syncs(grad_scale_func=lambda loss: 1 / 0, grad_sync_func=lambda p: 1 / 0, param_sync_func=lambda p: 1 / 0)
    store, model = run(function, syncs.config, forward_only=True)
    assert store == [4.0, 8.0, 12.0]
    assert (model.weight.grad, syncs.events, syncs.open) == (None, [], 0)


def failing_forward(iterator, model, *flag):
    if next(iterator).sum() == 6:
        raise KeyError("spoilt")
    return model(torch.ones(2)), lambda output: (output.sum(), None)


def failing_backward(iterator, model, *flag):
    output = model(next(iterator))
    output.register_hook(lambda gradient: 1 / 0)
    return output, lambda output: (output.sum(), None)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda iterator, model: model(next(iterator)), "forward_step_func returned a Tensor"),
        (lambda iterator, model: (1, 2, 3), "forward_step_func returned 3 things"),
        (lambda iterator, model: next(iter(())), "the data iterator has ended"),
        (lambda iterator, model: (model(next(iterator)), lambda output: (1.0, {})), "it returned a float"),
    ],
)
def test_a_forward_step_that_returns_something_else_is_told_what_it_returns(step, message):
    with pytest.raises(EngineError, match=message):
        run(forward_backward_no_pipelining, Syncs().config, step)


@pytest.mark.shows("parallel.no_sync_func")
@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize(
    ("step", "cause", "action"), [(failing_forward, KeyError, "0F2"), (failing_backward, ZeroDivisionError, "0B0")]
)
def test_an_exception_anywhere_leaves_no_sync_and_names_the_action(function, step, cause, action):
    syncs = Syncs(gradient_accumulation_fusion=True)
    model = Model(syncs.config)
    with pytest.raises(EngineError, match=f"failed in {action}") as error:
        run(function, syncs.config, step, model)
    assert isinstance(error.value.__cause__, cause)
    assert syncs.open == 0
    model.weight.sum().backward()
    assert model.weight.grad is not None, "the hooks that move gradients are gone"


def test_a_first_stage_that_is_cut_off_from_its_gradients_is_refused_unless_it_is_frozen():
    config = Syncs().config
    chunks = [Model(config), Model(config)]

    def cut_off(iterator, model):
        output, loss_func = forward(inputs() if iterator is None else iterator, model)
        return output.detach() if model is chunks[0] else output, loss_func

    def call(**more):
        return run(EVERY[-1], config, cut_off, data_iterator=[inputs(), None], model=chunks, **more)

    with pytest.raises(EngineError, match=r"PP-E729: pp_rank 0 .* failed in 0F0: the first stage's output"):
        call()
    assert len(call(forward_only=True)[0]) == M
    chunks[0].requires_grad_(False)
    call()
    assert chunks[0].weight.grad is None and chunks[1].weight.grad is not None


def test_no_sync_functions_of_several_models_are_entered_together():
    syncs = Syncs()
    syncs.config.no_sync_func = [syncs.no_sync, syncs.no_sync]
    seen = []

    def step(iterator, model):
        seen.append(syncs.open)
        return forward(iterator, model)

    run(forward_backward_no_pipelining, syncs.config, step)
    assert (seen, syncs.open) == ([2, 2, 0], 0)


def test_tokens_are_counted_over_the_step_where_the_loss_is_per_token():
    syncs = Syncs(calculate_per_token_loss=True)

    def step(iterator, model):
        return model(next(iterator)), lambda output: (output.sum(), torch.tensor(5, dtype=torch.int), None)

    _, model = run(forward_backward_no_pipelining, syncs.config, step, force_all_reduce=True)
    (event,) = syncs.events
    assert event == (1, torch.tensor(15), {"pg_collection": None, "force_all_reduce": True})
    assert model.weight.grad.tolist() == [6.0, 6.0], "a sum over the tokens, not divided by the microbatches"


def test_whatever_is_collected_is_stored_as_it_is():
    def step(iterator, model):
        return model(next(iterator)), lambda output, non_loss_data: output.flatten().tolist() if non_loss_data else None

    store, _ = run(forward_backward_no_pipelining, Syncs().config, step, forward_only=True, collect_non_loss_data=True)
    assert store == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]
    store, _ = run(
        forward_backward_no_pipelining, Syncs().config, lambda i, model: (model(next(i)), None), forward_only=True
    )
    assert [output.flatten().tolist() for output in store] == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


def test_the_chosen_function_follows_the_model():
    syncs = Syncs()
    chosen = get_forward_backward_func()
    assert run(chosen, syncs.config)[0] == [4.0, 8.0, 12.0]
    chunks = [Model(syncs.config), Model(syncs.config, 3.0)]

    def step(iterator, model):
        return forward(inputs() if iterator is None else iterator, model)

    store, _ = run(chosen, syncs.config, step, data_iterator=[inputs(), None], model=chunks)
    assert store == [12.0, 24.0, 36.0], "two chunks on one rank, one after the other"
    assert run(chosen, syncs.config, data_iterator=[inputs()], model=[Model(syncs.config)])[0] == [4.0, 8.0, 12.0]
    with pytest.raises(ConfigError, match="there is no model"):
        chosen()


@pytest.mark.shows("parallel.timers")
def test_the_timers_of_a_step():
    marks = []

    class Timer:
        def __init__(self, name, log_level):
            self.name = f"{name} {log_level}"

        def start(self, **how):
            marks.append((self.name, how))

        def stop(self):
            marks.append(("stop " + self.name, {}))

    run(forward_backward_no_pipelining, Syncs(timers=Timer, barrier_with_L1_time=False).config, num_microbatches=1)
    whole = "forward-backward 1"
    assert marks[0] == (whole, {"barrier": False}) and marks[-1][0] == f"stop {whole}"
    inner = ["forward-compute 2", "backward-compute 2"]
    assert [name for name, _ in marks[1:-1]] == [mark for name in inner for mark in (name, f"stop {name}")]


one = partial(run, forward_backward_pipelining_without_interleaving)
many = partial(run, forward_backward_pipelining_with_interleaving)
none = partial(run, forward_backward_no_pipelining)
SIZED = SimpleNamespace(total_stages=2)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (one, {"model": [1, 2]}, "model is a list of 2"),
        (none, {"data_iterator": [1, 2]}, "data_iterator is a list of 2"),
        (many, {"model": nn.Linear(1, 1), "data_iterator": None}, "takes a list of models"),
        (many, {"data_iterator": iter(())}, "one for each of the 1 chunks, not a tuple_iterator"),
        (many, {"data_iterator": []}, "one for each of the 1 chunks, not 0"),
        (one, {"model": nn.Linear(1, 1)}, "Linear has no config"),
        (many, {"adjust_tensor_shapes_fn": max}, "belongs to the schedule without interleaving"),
        (none, {"adjust_tensor_shapes_fn": max}, "belongs to the schedule without interleaving"),
        (none, {"p2p_communicator": SIZED}, "has 2 ranks, but this function does not pipeline"),
        (one, {"num_microbatches": 0}, "num_microbatches must be above 0, not 0"),
        (one, {"num_microbatches": None}, "num_microbatches is None, but must be a whole number"),
        (many, {"num_microbatches": 2.0}, "num_microbatches is 2.0"),
        (one, {"p2p_communicator": 3}, "p2p_communicator is a int"),
        (one, {"forward_step_func": None}, "forward_step_func is a NoneType"),
    ],
)
def test_calls_that_cannot_be_meant_are_refused_before_anything_runs(call, arguments, message):
    syncs = Syncs()
    with pytest.raises(ConfigError, match=message):
        call(syncs.config, lambda *_: 1 / 0, **arguments)
    assert syncs.open == 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_microbatches_with_partial_activation_checkpoints", -1, "it counts microbatches"),
        ("grad_sync_func", [print, print], "lists 2 functions for 1 chunks"),
        ("defer_embedding_wgrad_compute", True, "gradient_accumulation_fusion makes"),
        ("overlap_moe_expert_parallel_comm", True, "PP-E110: config.overlap_moe_expert_parallel_comm"),
        ("delay_wgrad_compute", True, "PP-E110: config.delay_wgrad_compute"),
        ("fine_grained_activation_offloading", True, "PP-E110: config.fine_grained_activation_offloading"),
        ("hybrid_context_parallel", True, "PP-E110: config.hybrid_context_parallel"),
        ("cuda_graph_impl", "local", "(?s)PP-E110: config.cuda_graph_impl = 'local'.*config.cuda_graph_impl = 'none'"),
        ("cpu_offloading", True, "PP-E396: config.cpu_offloading is on, but no layer"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_runs(field, value, message):
    with pytest.raises(ConfigError, match=message):
        many(Syncs(**{field: value}).config, lambda *_: 1 / 0)
