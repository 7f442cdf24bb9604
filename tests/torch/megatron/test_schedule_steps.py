"""The parts of the schedules API by themselves: against Megatron's vectors, and where they are better on purpose."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import ppctl
from ppctl import (
    backward_step,
    check_first_val_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
    forward_step_calc_loss,
    get_forward_backward_func,
    get_tensor_shapes,
    set_current_microbatch,
)
from ppctl.errors import ConfigError, TrainingError

RECORDS = json.loads((Path(__file__).parents[2] / "golden" / "p2p.json").read_text())["records"]


def loses_tokens(sequence, cp, tp, sequence_parallel):
    """Whether get_tensor_shapes of the original truncates without a word."""
    return sequence % cp != 0 or (sequence_parallel and sequence // cp % tp != 0)


def of(name):
    return [record for record in RECORDS if record["fn"] == name]


def group(size):
    return SimpleNamespace(size=lambda: size)


@pytest.mark.parametrize("record", of("get_tensor_shapes"), ids=lambda r: json.dumps(r["args"]))
def test_shapes_are_the_originals_where_nothing_is_lost(record):
    args = dict(record["args"])
    sizes = {name: args.pop(name) for name in ("hidden_size", "tp", "cp", "sequence_parallel", "variable_seq_lengths")}
    config = SimpleNamespace(**{k: v for k, v in sizes.items() if k not in ("tp", "cp")})
    call = {**args, "config": config, "tp_group": group(sizes["tp"]), "cp_group": group(sizes["cp"])}
    if loses_tokens(args["seq_length"], sizes["cp"], sizes["tp"], sizes["sequence_parallel"]):
        with pytest.raises(ConfigError, match=r"PP-E396: a sequence of .* cannot be divided"):
            get_tensor_shapes(**call)
    else:
        assert [list(shape) for shape in get_tensor_shapes(**call)] == record["result"]


def test_lengths_that_vary_are_a_placeholder_and_sizes_without_groups_are_the_configs():
    sizes = {"seq_length": 16, "micro_batch_size": 2, "decoder_seq_length": None, "tp_group": None, "cp_group": None}
    assert get_tensor_shapes(config=SimpleNamespace(variable_seq_lengths=True), **sizes) == [()]
    config = SimpleNamespace(
        hidden_size=8, context_parallel_size=2, tensor_model_parallel_size=4, sequence_parallel=True
    )
    assert get_tensor_shapes(config=config, **sizes) == [(2, 2, 8)]
    with pytest.raises(ConfigError, match="hidden size"):
        get_tensor_shapes(config=SimpleNamespace(), **sizes)


@pytest.mark.parametrize("record", of("get_forward_backward_func"), ids=lambda r: json.dumps(r["args"]))
def test_the_function_for_given_sizes_is_the_originals(record):
    assert get_forward_backward_func(**record["args"]).__name__ == record["result"]


@pytest.mark.parametrize("sizes", [(2, -3), (2, 0), (0, None), (-1, 2)])
def test_there_is_no_function_for_sizes_below_one(sizes):
    with pytest.raises(ConfigError, match=r"PP-E396: .p_size must be at least 1, not "):
        get_forward_backward_func(*sizes)


@pytest.mark.parametrize("record", of("check_first_val_step"), ids=lambda r: json.dumps(r["args"]))
def test_the_first_step_of_a_validation_is_the_originals(record):
    assert check_first_val_step(**record["args"]) is record["result"]


def told_by(record, act):
    """`act()`'s result as the record writes it; errors by type."""
    if record["ok"]:
        result = act()
        assert record["result"] == (None if result is None else {**record["result"], "tensor": list(result.shape)})
        return
    with pytest.raises({"AssertionError": AssertionError}[record["error"]["type"]]):
        act()


def test_freeing_and_custom_backward_do_what_the_original_does():
    acts = {
        "tensor, False -> untouched": lambda: kept(torch.zeros(3, 4), False),
        "view -> refused": lambda: kept(torch.zeros(3, 4)[0], True),
        "None": lambda: kept(None, True),
        "freed output, real grad shape 3": freed_and_back,
        "scalar, None grad": lambda: custom_backward(torch.ones(3, requires_grad=True).sum(), None),
        "first stage None in": lambda: backward_step(None, torch.ones(2, requires_grad=True).sum(), None, None, CONFIG),
    }
    records = [*of("deallocate_output_tensor"), *of("custom_backward"), *of("backward_step")]
    assert records
    for record in records:
        told_by(record, acts[record["args"]])


CONFIG = SimpleNamespace()


def kept(tensor, free):
    deallocate_output_tensor(tensor, free)
    return tensor


def freed_and_back():
    x = torch.arange(3.0, requires_grad=True)
    output = x * 2
    deallocate_output_tensor(output, True)
    assert output.numel() == 1
    custom_backward(output, torch.ones(3))
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
    return x.grad


def test_lists_and_dicts_are_freed_whole_and_what_is_no_tensor_is_refused():
    tensors = [torch.zeros(4) for _ in range(3)]
    deallocate_output_tensor([tensors[0], {"a": tensors[1], "b": None}, (tensors[2],)], True)
    assert [t.numel() for t in tensors] == [1, 1, 1]
    with pytest.raises(AssertionError, match="PP-E726: a str has no memory"):
        deallocate_output_tensor("text", True)


def test_custom_backward_refuses_an_output_that_was_not_freed():
    with pytest.raises(AssertionError, match=r"PP-E726: .* shape \[3\]"):
        custom_backward(torch.ones(3, requires_grad=True) * 2, torch.ones(3))


@pytest.mark.parametrize("form", ["seed", "newer", "keywords"])
def test_backward_step_takes_both_call_forms(form):
    x = torch.arange(3.0, requires_grad=True)
    rest = {
        "seed": ((None, "encoder", CONFIG), {}),
        "newer": ((None, CONFIG), {}),
        "keywords": ((), {"config": CONFIG}),
    }
    args, keywords = rest[form]
    more = {"output_tensor_grad": None} if form == "keywords" else {}
    assert backward_step(x, (x * x).sum(), *args, **more, **keywords).tolist() == [0.0, 2.0, 4.0]


def test_backward_step_goes_through_every_output_and_returns_a_list_for_a_list():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    grads = backward_step([x, y], [x * 2, x + 3 * y], [torch.ones(2), torch.full((2,), 10.0)], CONFIG)
    assert [g.tolist() for g in grads] == [[12.0, 12.0], [30.0, 30.0]]
    assert backward_step([None], [x.sum()], [None], CONFIG) == [None]


def test_backward_step_from_a_freed_output_and_with_a_scaled_loss():
    x = torch.ones(2, requires_grad=True)
    output = x * 3
    deallocate_output_tensor(output, True)
    assert backward_step(x, output, torch.ones(2), CONFIG).tolist() == [3.0, 3.0]
    y = torch.ones(2, requires_grad=True)
    scaled = SimpleNamespace(grad_scale_func=lambda loss: loss * 8)
    assert backward_step(y, y.sum(), None, scaled).tolist() == [8.0, 8.0]


def test_an_input_without_a_gradient_is_an_error_and_not_a_none():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TrainingError, match="PP-E713"):
        backward_step(x, torch.ones(2, requires_grad=True) * 2, torch.ones(2), CONFIG)


def calc(returned, *, m=4, cp=1, collect=False, last=True, grad=True, **config):
    """(output, tokens, store) of one loss function's return."""
    store = []
    function = None if returned is None else lambda output, **flags: (returned, flags) if collect else returned
    with torch.set_grad_enabled(grad):
        output, tokens = forward_step_calc_loss(
            nn.Identity(), torch.tensor(3.0), function, SimpleNamespace(**config), None, collect, m, store, cp, last
        )
    return output.item(), tokens.item(), store


TWELVE = torch.tensor(12.0)


@pytest.mark.parametrize(
    ("returned", "how", "output", "tokens", "stored"),
    [
        ((TWELVE, "data"), {}, 3.0, 0, ["data"]),
        ((TWELVE, "data"), {"cp": 2}, 6.0, 0, ["data"]),
        ((TWELVE, 3, "data"), {}, 1.0, 3, ["data"]),
        ((TWELVE, torch.tensor(3, dtype=torch.int), "data"), {"cp": 2}, 1.0, 3, ["data"]),
        ((TWELVE, 0, "data"), {}, 3.0, 0, ["data"]),
        ((TWELVE, 3, "data"), {"calculate_per_token_loss": True}, 12.0, 3, ["data"]),
        ((TWELVE, "data"), {"calculate_per_token_loss": True, "grad": False}, 3.0, 0, ["data"]),
        ("anything", {"collect": True}, 3.0, 0, [("anything", {"non_loss_data": True})]),
        (None, {}, 3.0, 0, [torch.tensor(3.0)]),
        ((TWELVE, "data"), {"last": False}, 3.0, 0, []),
        ((TWELVE, "data"), {"last": None}, 3.0, 0, ["data"]),
    ],
)
def test_the_forms_of_a_loss_and_their_scaling(returned, how, output, tokens, stored):
    assert calc(returned, **how) == (output, tokens, stored)
    assert TWELVE.item() == 12.0, "scaled out of place"


@pytest.mark.parametrize(
    ("returned", "how", "message"),
    [
        ((TWELVE,), {}, "a tuple of 1"),
        ((TWELVE, 1, 2, 3), {}, "a tuple of 4"),
        (TWELVE, {}, "a Tensor"),
        ((TWELVE, "data"), {"calculate_per_token_loss": True}, "without a count"),
        ((TWELVE, torch.tensor(3.0), "data"), {"calculate_per_token_loss": True}, r"num_tokens is float32\[\]"),
        ((TWELVE, torch.tensor([1, 2]), "data"), {}, r"num_tokens is int64\[2\]"),
    ],
)
def test_other_forms_are_refused_in_words(returned, how, message):
    with pytest.raises(TrainingError, match=f"PP-E725.*{message}"):
        calc(returned, **how)


@pytest.mark.parametrize("dtype", [torch.int, torch.int64, torch.int16])
def test_a_count_of_tokens_is_an_int32_of_its_own_as_on_other_ranks(dtype):
    given = torch.tensor([3], dtype=dtype)
    _, tokens = forward_step_calc_loss(
        nn.Identity(), TWELVE, lambda _: (TWELVE, given, given), CONFIG, None, False, 1, [], 1, True
    )
    tokens.mul_(8)  # what a sum over ranks does
    assert (tokens.dtype, tokens.shape, tokens.item(), given.item()) == (torch.int, (), 24, 3)


class Stage(nn.Module):
    """A stage that remembers what it was told."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.decoder = SimpleNamespace(layers=[SimpleNamespace(), SimpleNamespace()])
        self.told = []

    def set_input_tensor(self, tensors):
        self.told.append(tensors)

    def set_is_first_microbatch(self):
        self.told.append("first")

    def set_moe_loss_scale(self, scale):
        self.told.append(("moe", scale.item()))

    def set_mtp_loss_scale(self, scale):
        self.told.append(("mtp", scale.item()))


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def step(model, config=CONFIG, input_tensor=None, **more):
    seen = []

    def func(iterator, module, *flag):
        seen.append((next(iterator), flag, torch.is_autocast_enabled("cpu")))
        return torch.ones(2), lambda output: (output.sum(), "data")

    store = []
    output, tokens = forward_step(func, iter("ab"), model, 2, input_tensor, store, config, 1, **more)
    return output, tokens.item(), store, seen


def test_forward_step_tells_a_wrapped_model_all_that_it_wants_to_know():
    stage = Stage()
    x = torch.ones(2)
    output, tokens, store, seen = step(
        Wrapped(stage),
        input_tensor=x,
        checkpoint_activations_microbatch=True,
        is_first_microbatch=True,
        current_microbatch=5,
    )
    assert stage.told == ["first", [x]]
    assert [layer.current_microbatch for layer in stage.decoder.layers] == [5, 5]
    assert (output.item(), tokens, store, seen) == (1.0, 0, ["data"], [("a", (True,), False)])


def test_a_list_in_gives_a_list_out_and_a_stage_before_the_last_gives_its_output():
    output, _, store, _ = step(Stage(), input_tensor=[torch.ones(2)], is_last_stage=False)
    assert [t.tolist() for t in output] == [[1.0, 1.0]] and store == []


def test_autocast_and_timers_are_the_configs():
    marks = []

    def timers(name, log_level):
        return SimpleNamespace(start=lambda: marks.append((name, log_level)), stop=lambda: marks.append("stop"))

    config = SimpleNamespace(enable_autocast=True, autocast_dtype="bfloat16", timers=timers)
    *_, seen = step(Stage(), config)
    assert seen == [("a", (), True)]
    assert marks == [("forward-compute", 2), "stop"]


@pytest.mark.shows("parallel.grad_scale_func")
def test_auxiliary_losses_are_scaled_as_the_loss_is():
    stage = Stage()
    config = SimpleNamespace(num_moe_experts=8, mtp_num_layers=1, mtp_grad_scale_func=lambda one: 8 * one)
    step(stage, config)
    assert stage.told == [[None], ("moe", 0.5), ("mtp", 4.0)]
    with pytest.raises(TrainingError, match="PP-E725: the moe loss has one scale"):
        step(stage, SimpleNamespace(num_moe_experts=8, grad_scale_func=lambda one: torch.ones(2)))


def test_a_model_that_cannot_take_its_input_is_told():
    with pytest.raises(ConfigError, match="PP-E396: Linear gets its input"):
        step(nn.Linear(2, 2), input_tensor=torch.ones(2))
    set_current_microbatch(nn.Linear(2, 2), 3)


CALL = (
    "forward_step_func data_iterator model num_microbatches seq_length micro_batch_size decoder_seq_length=None "
    "forward_only=False collect_non_loss_data=False first_val_step=None adjust_tensor_shapes_fn=None"
)
SIGNATURES = {
    "backward_step": "input_tensor output_tensor output_tensor_grad model_type config",
    "check_first_val_step": "first_val_step forward_only cond",
    "clear_embedding_activation_buffer": "config model is_last_stage",
    "convert_schedule_table_to_order": "num_warmup_microbatches num_model_chunks schedule_table",
    "custom_backward": "output grad_output",
    "deallocate_output_tensor": "out deallocate_pipeline_outputs=False",
    "finish_embedding_wgrad_compute": "config embedding_module is_last_stage tp_group",
    "forward_backward_no_pipelining": f"{CALL} pg_collection=None",
    "forward_backward_pipelining_with_interleaving": f"{CALL} p2p_communicator=None pg_collection=None",
    "forward_backward_pipelining_without_interleaving": f"{CALL} p2p_communicator=None pg_collection=None",
    "forward_step": "forward_step_func data_iterator model num_microbatches input_tensor forward_data_store config "
    "cp_group_size collect_non_loss_data=False checkpoint_activations_microbatch=None is_first_microbatch=False "
    "current_microbatch=None vp_stage=None is_last_stage=True",
    "forward_step_calc_loss": "model output_tensor loss_func config vp_stage collect_non_loss_data num_microbatches "
    "forward_data_store cp_group_size=None is_last_stage=None",
    "get_forward_backward_func": "",
    "get_pp_rank_microbatches": "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage "
    "forward_only=False overlap_moe_expert_parallel_comm=False p2p_communicator=None",
    "get_schedule_table": "num_microbatches num_model_chunks microbatch_group_size_per_vp_stage",
    "get_tensor_shapes": "seq_length micro_batch_size decoder_seq_length config tp_group cp_group",
    "set_current_microbatch": "model microbatch_id",
}
"""The documented parameters and defaults, in order."""

MORE = {
    "forward_backward_no_pipelining": ["p2p_communicator", "force_all_reduce"],
    "forward_backward_pipelining_with_interleaving": ["force_all_reduce"],
    "forward_backward_pipelining_without_interleaving": ["force_all_reduce"],
    "get_forward_backward_func": ["pp_size", "vp_size"],
}
"""Parameters of later versions, all with a default."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_documented_parameters_have_their_names_order_and_defaults(name):
    assert getattr(ppctl, name).__doc__
    parameters = inspect.signature(getattr(ppctl, name)).parameters
    told = dict(part.partition("=")[::2] for part in SIGNATURES[name].split())
    assert [p for p in parameters if p not in MORE.get(name, ())] == list(told)
    if name != "backward_step":  # the newer form leaves model_type out, so that both of its last two may be missing
        given = {n: "" if p.default is p.empty else str(p.default) for n, p in parameters.items()}
        assert {n: given[n] for n in told} == told
    assert all(parameters[more].default is None for more in MORE.get(name, ()))


def test_a_model_adds_its_own_fields_to_the_config():
    config = ppctl.ModelParallelConfig()
    config.hidden_size = 8
    sizes = {"seq_length": 4, "micro_batch_size": 2, "decoder_seq_length": None, "tp_group": None, "cp_group": None}
    assert get_tensor_shapes(config=config, **sizes) == [(4, 2, 8)]


def test_every_public_name_can_be_imported_from_the_top():
    assert all(getattr(ppctl, name) is not None for name in ppctl.__all__)
    assert ppctl.forward_step is forward_step and callable(ppctl.P2PCommunicator)
