"""The public schedules API between real processes: worlds as pipelines, lists of tensors, shapes, and failures."""

import json
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from live_memory import made_messages
from ranks import RanksFailed, run_ranks
from torch import nn

from ppctl import (
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from ppctl.comm.groups import make_group
from ppctl.config.model_parallel_config import ModelParallelConfig
from ppctl.engine.engine_error import EngineError
from ppctl.errors import ConfigError
from ppctl.megatron import pipelines
from ppctl.megatron.p2p_communication import P2PCommunicator

M, S, B, H = 4, 3, 2, 5


def config_of(**more):
    fields = {
        "hidden_size": H,
        "pipeline_dtype": torch.float32,
        "batch_p2p_comm": False,
        "microbatch_group_size_per_vp_stage": None,
    }
    return SimpleNamespace(**fields | more)


class Stage(nn.Module):
    """One layer, by its global number."""

    def __init__(self, number, config):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(H, H)
        self.number, self.config = number, config
        self.inputs = None

    def set_input_tensor(self, tensors):
        self.inputs = tensors

    def forward(self, x):
        x = x if self.inputs[0] is None else self.inputs[0]
        return torch.tanh(self.linear(x))


def data(mb, length=S):
    return torch.randn(length, B, H, generator=torch.Generator().manual_seed(mb))


def pair(output):
    loss = output.square().mean()
    return loss, loss.item()


def step(iterator, model):
    return model(data(next(iterator))), pair


def sizes(**more):
    return {"num_microbatches": M, "seq_length": S, "micro_batch_size": B} | more


def reference(stages, length=S):
    """A plain loop: (losses, gradients by stage). `length` is one for all microbatches, or a list."""
    models = [Stage(number, None).linear for number in range(stages)]
    losses = []
    for mb in range(M):
        x = data(mb, length if isinstance(length, int) else length[mb])
        for model in models:
            x = torch.tanh(model(x))
        loss = x.square().mean()
        losses.append(loss.item())
        (loss / M).backward()
    return losses, [model.weight.grad for model in models]


def same(results, stages, pp, length=S):
    """Whether (store, gradients by chunk) of all ranks are the plain loop's."""
    ((losses, gradients),) = run_ranks(reference, 1, stages, length)
    stores = [store for store, _ in results]
    assert stores == [[]] * (pp - 1) + [losses]
    for rank, (_, own) in enumerate(results):
        for chunk, gradient in enumerate(own):
            assert torch.equal(gradient, gradients[rank + chunk * pp])
    return True


def on_the_world(vpp):
    """Three times without a communicator and without groups: the world is the pipeline, and is kept."""
    config = config_of(pipeline_model_parallel_size=dist.get_world_size())
    pp = dist.get_world_size()
    chunks = [Stage(dist.get_rank() + pp * chunk, config) for chunk in range(vpp or 1)]
    buffers = []
    for _ in range(3):
        for chunk in chunks:
            chunk.zero_grad()
        iterators = [iter(range(M)) for _ in chunks]
        with made_messages() as made:
            store = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if vpp else iterators[0],
                model=chunks if vpp else chunks[0],
                **sizes(),
            )
        (kept,) = [communicator for _, communicator in pipelines._made.values()]
        buffers.append((id(kept), len(made)))
    assert (buffers[0][0], 0) == buffers[-1], "the model keeps its last input, and yet a step needs no new buffers"
    return store, [chunk.linear.weight.grad for chunk in chunks]


@pytest.mark.parametrize(("pp", "vpp"), [(2, None), (2, 1), (2, 2), (3, None), (3, 2)])
def test_the_world_is_the_pipeline_unless_something_else_is_said(pp, vpp):
    assert same(run_ranks(on_the_world, pp, vpp), pp * (vpp or 1), pp)


def in_groups():
    """Two pipelines in one world: by groups, and by a communicator over the group."""
    group = make_group([(0, 2), (3, 1)])
    results = []
    for by_groups in (True, False):
        model = Stage(group.rank(), config_of(pipeline_model_parallel_size=2))
        one = {"pg_collection": SimpleNamespace(pp=group)}
        other = {"p2p_communicator": P2PCommunicator(group, model.config)}
        store = forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(range(M)),
            model=model,
            **sizes(),
            **(one if by_groups else other),
        )
        results.append((store, [model.linear.weight.grad]))
    return results


def test_a_pipeline_may_be_a_part_of_the_world():
    by_rank = run_ranks(in_groups, 4)
    for way in range(2):
        for first, second in ((0, 2), (3, 1)):
            assert same([by_rank[first][way], by_rank[second][way]], 2, 2)


def whose():
    model = Stage(dist.get_rank(), config_of(pipeline_model_parallel_size=4))
    call = partial(get_forward_backward_func(), forward_step_func=step, data_iterator=None)
    told = [refused(call, model=model, **sizes())]
    model.config.pipeline_model_parallel_size = 2
    told.append(refused(call, model=model, **sizes(seq_length=S + dist.get_rank())))
    chunks = [model] * (1 + dist.get_rank())
    told.append(refused(call, model=chunks, data_iterator=None, **sizes()))
    return told


def refused(call, **arguments):
    try:
        call(**arguments)
    except ConfigError as error:
        return str(error)


def test_a_pipeline_that_the_ranks_do_not_agree_on_is_refused():
    for world, length, chunks in run_ranks(whose, 2):
        assert "the config has 4 pipeline ranks, but the world 2" in world
        assert f"seq_length is {S} on pp_rank 0 and {S + 1} on pp_rank 1" in length
        assert "number of model chunks is 1 on pp_rank 0 and 2 on pp_rank 1" in chunks


def decoder_lengths(vpp):
    """The sequence that travels is the decoder's, in both schedules."""
    config = config_of()
    chunks = [Stage(dist.get_rank() + 2 * chunk, config) for chunk in range(vpp)]
    function = (
        forward_backward_pipelining_with_interleaving if vpp > 1 else forward_backward_pipelining_without_interleaving
    )

    def longer(iterator, model):
        return model(data(next(iterator), 7)), pair

    store = function(
        forward_step_func=longer,
        data_iterator=[iter(range(M)) for _ in chunks],
        model=chunks,
        **sizes(seq_length=99, decoder_seq_length=7),
    )
    return store, [chunk.linear.weight.grad for chunk in chunks]


@pytest.mark.parametrize("vpp", [1, 2])
def test_what_travels_is_as_long_as_the_decoders_sequence(vpp):
    assert same(run_ranks(decoder_lengths, 2, vpp), 2 * vpp, 2, 7)


def two_tensors(lie):
    """Stages hand on two tensors of different shapes; `lie` makes stage 0 hand on a third."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    model = Stage(rank, config_of())
    seen = []

    def step(iterator, model):
        mb = next(iterator)
        seen.append([None if t is None else tuple(t.shape) for t in model.inputs])
        x, y = (data(mb), data(mb)[0]) if rank == 0 else model.inputs
        x, y = torch.tanh(model.linear(x)), model.linear(y)
        if rank == last:
            return x.mean() + y.mean(), lambda loss: (loss, loss.item())
        return [x, y] + [x] * lie, None

    def adjust(receives, sends):
        assert receives == sends == [(S, B, H)]
        return [*receives, (B, H)], [*sends, (B, H)]

    store = forward_backward_pipelining_without_interleaving(
        forward_step_func=step,
        data_iterator=iter(range(M)),
        model=model,
        adjust_tensor_shapes_fn=adjust,
        **sizes(),
    )
    return store, model.linear.weight.grad, seen[0]


def two_tensors_by_hand(stages):
    models = [Stage(number, None) for number in range(stages)]
    losses = []
    for mb in range(M):
        x, y = data(mb), data(mb)[0]
        for model in models:
            x, y = torch.tanh(model.linear(x)), model.linear(y)
        loss = x.mean() + y.mean()
        losses.append(loss.item())
        (loss / M).backward()
    return losses, [model.linear.weight.grad for model in models]


def test_stages_may_hand_on_lists_of_tensors_and_every_one_has_its_gradient():
    ((losses, gradients),) = run_ranks(two_tensors_by_hand, 1, 3)
    results = run_ranks(two_tensors, 3, False)
    assert [store for store, *_ in results] == [[], [], losses]
    assert all(torch.equal(own, reference) for (_, own, _), reference in zip(results, gradients, strict=True))
    assert [shapes for *_, shapes in results] == [[None], *[[(S, B, H), (B, H)]] * 2]


def test_a_tensor_too_many_is_an_error_that_names_the_stage():
    with pytest.raises(RanksFailed, match=r"stage 0 put .* on its edge to stage 1"):
        run_ranks(two_tensors, 2, True)


def broken(how):
    """A middle stage fails: raises what the rank is told, and whether it left no_sync."""
    rank = dist.get_rank()
    held = []

    class Held:
        def __enter__(self):
            held.append(self)

        def __exit__(self, *error):
            held.pop()

    def step(iterator, model):
        mb = next(iterator)
        output = model(data(mb))
        if rank == 1 and mb == 1:
            if how == "raises":
                raise KeyError("spoilt")
            output = output.detach().requires_grad_()
        return output, pair

    try:
        forward_backward_pipelining_without_interleaving(
            forward_step_func=step,
            data_iterator=iter(range(M)),
            model=Stage(rank, config_of(no_sync_func=Held)),
            **sizes(),
        )
    except EngineError as error:
        told = {"code": error.problems[0].code, "action": str(error.action), "held": len(held), "text": str(error)}
        raise RuntimeError(json.dumps(told)) from error


@pytest.mark.parametrize(("how", "code", "action"), [("raises", "PP-E710", "1F1"), ("detaches", "PP-E713", "1B1")])
def test_a_stage_that_fails_says_so_and_leaves_no_sync(how, code, action):
    with pytest.raises(RanksFailed) as error:
        run_ranks(broken, 3, how)
    first = error.value.failures[0]
    told = json.loads(first.message)
    assert (first.rank, told["code"], told["action"], told["held"]) == (1, code, action, 0)
    assert "stage 1" in told["text"]


def with_the_defaults(pp_size, vpp, length_of):
    """ModelParallelConfig as it comes (batched messages), or with lengths that differ between microbatches."""

    @dataclass
    class Config(ModelParallelConfig):
        hidden_size: int = H

    rank, pp = dist.get_rank(), dist.get_world_size()
    config = Config(pipeline_model_parallel_size=pp_size, pipeline_dtype=torch.float32)
    config.variable_seq_lengths = length_of is not None
    chunks = [Stage(rank + pp * chunk, config) for chunk in range(vpp)]

    def step(iterator, model):
        mb = next(iterator)
        return model(data(mb, S if length_of is None else length_of[mb])), pair

    store = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(M)) for _ in chunks],
        model=chunks,
        **sizes(),
    )
    return store, [chunk.linear.weight.grad for chunk in chunks]


@pytest.mark.parametrize(("pp", "vpp"), [(2, 2), (3, 2), (2, 1)])
def test_the_documented_defaults_work_and_two_ranks_interleave_rightly(pp, vpp):
    assert same(run_ranks(with_the_defaults, pp, pp, vpp, None), pp * vpp, pp)


LENGTHS = [3, 7, 1, 4]


@pytest.mark.parametrize(("pp", "vpp"), [(1, 2), (2, 2), (3, 1)])
def test_lengths_may_differ_between_microbatches(pp, vpp):
    assert same(run_ranks(with_the_defaults, pp, pp, vpp, LENGTHS), pp * vpp, pp, LENGTHS)


def timers_of_a_step(batched):
    """How often each timer of the config has run, and that none runs inside another of its level."""
    counts, open_now = {}, []

    def timers(name, log_level):
        def start(**_):
            assert log_level == 1 or not open_now, (name, open_now)
            open_now.extend([name] * (log_level == 2))
            counts[name] = counts.get(name, 0) + 1

        return SimpleNamespace(start=start, stop=lambda: log_level == 2 and open_now.remove(name))

    config = config_of(timers=timers, batch_p2p_comm=batched)
    get_forward_backward_func(dist.get_world_size())(
        forward_step_func=lambda iterator, model: (model(data(next(iterator))), pair),
        data_iterator=iter(range(M)),
        model=Stage(dist.get_rank(), config),
        **sizes(),
    )
    assert open_now == []
    return counts


COMPUTE = {"forward-backward": 1, "forward-compute": M, "backward-compute": M}


def test_the_configs_timers_run_around_compute_and_around_what_waits_for_messages():
    down, up = {"forward-send", "backward-recv"}, {"forward-recv", "backward-send"}
    first, middle, last = run_ranks(timers_of_a_step, 3, False)
    for counts, messages in ((first, down), (middle, down | up), (last, up)):
        assert {name: counts[name] for name in COMPUTE} == COMPUTE
        assert counts.keys() - COMPUTE.keys() == messages
        assert all(counts[name] >= M for name in messages)


def test_a_batch_of_messages_is_timed_once_under_megatrons_name_for_them_together():
    first, middle, last = run_ranks(timers_of_a_step, 3, True)
    assert first == COMPUTE | {"forward-send": 2, "forward-send-backward-recv": 2, "backward-recv": 2}
    assert last == COMPUTE | {"forward-recv": 2, "backward-send-forward-recv": 2, "backward-send": 2}
    assert middle.keys() - COMPUTE.keys() > {"forward-send-backward-recv"}
