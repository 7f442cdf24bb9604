"""Data-parallel replicas sum their gradients once a step, train as one process does, and stay bit-equal."""

import pytest
import torch
import torch.distributed as dist
from accumulated import accumulated
from by_hand import HandPipeline, train_by_hand
from cuts import cut, random_batches, tiny
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.schema import OptimConfig
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.parallel import replicate
from ppctl.parallel.replicate import GradientReducer, buckets

# AdamW divides a gradient by its own size, so that an element that is nearly zero (as against the sums' rounding) can
# move by the whole learning rate in another direction. An eps above that rounding keeps the weights within the law.
OPTIM = OptimConfig(lr=1e-3, warmup_steps=2, clip_grad=0.5, eps=1e-4)


@pytest.mark.parametrize(("layout", "pp", "dp"), [("EttttL", 1, 2), ("Ett|ttL", 2, 2), ("Et|tt|tL", 1, 3)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_replicas_train_as_one_process_does_but_for_the_order_of_a_sum(layout, pp, dp, tied):
    model = tiny(share_embeddings_and_output_weights=tied)
    batches = random_batches(model, steps=4, microbatches=6)
    losses, norms, weights = train_reference(model, OPTIM, 11, batches)[:3]
    ranks = run_ranks(train_by_hand, pp * dp, layout, pp, model, OPTIM, 11, batches)
    assert [sum(by_rank) for by_rank in zip(*(r[0] for r in ranks), strict=True)] == pytest.approx(losses, rel=1e-6)
    for _, own_norms, own_weights in ranks:
        assert own_norms == pytest.approx(norms, rel=1e-6)
        for name, weight in own_weights.items():
            assert relative(weight, weights[name]) <= 1e-6, name
    for pp_rank in range(pp):
        column = [r[2] for r in ranks[pp_rank::pp]]
        for name in column[0]:
            assert all(torch.equal(column[0][name], other[name]) for other in column), name


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def first_gradients(layout, pp, model, batch):
    pipeline = HandPipeline(layout, pp, model, OptimConfig(clip_grad=0), seed=11)
    pipeline.step(0, batch, 1)
    return accumulated(pipeline.weights)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradients_of_a_step_are_those_of_one_process_but_for_the_order_of_a_sum(seed):
    model = tiny()
    [batch] = random_batches(model, steps=1, microbatches=4, seed=seed)
    whole = build_stage(cut("EttttL", 1)[0], model, seed=11, dtype=torch.float32, device="cpu")
    for tokens, labels, mask in batch:
        microbatch_loss(whole(tokens)[0], labels, mask, sum(float(mask.sum()) for _, _, mask in batch)).backward()
    for gradients in run_ranks(first_gradients, 4, "Ett|ttL", 2, model, batch):
        for name, gradient in gradients.items():
            assert relative(gradient, whole.get_parameter(name).grad) <= 1e-6, name


def reduce_stages(limit, missing_on):
    """Stages 0 and 1 with a few gradients each; stage 1 is reduced first. Returns the summed gradients."""
    replicate.BUCKET_ELEMENTS = limit
    rank, size = dist.get_rank(), dist.get_world_size()
    shapes = {0: [(3, 4), (5,), (2, 2)], 1: [(7,), (1, 9)]}
    stages = {stage: [torch.nn.Parameter(torch.zeros(shape)) for shape in own] for stage, own in shapes.items()}
    for stage, own in stages.items():
        for i, parameter in enumerate(own):
            if not (rank == missing_on and (stage, i) == (0, 1)):
                parameter.grad = torch.full(parameter.shape, float((stage + 1) * 100 + i * 10 + rank))
    reducer = GradientReducer(stages, dist.group.WORLD)
    for _ in range(2):  # a second step sums the sums: nothing of the first is left running
        reducer.reduce(1)
        reducer.reduce(0)
        reducer.finish()
        assert not reducer._running  # finished work would keep its buckets alive
    return size, [[p.grad for p in own] for own in stages.values()]


@pytest.mark.parametrize("limit", [1, 6, 12, 1000])
def test_every_gradient_is_summed_whatever_the_buckets(limit):
    for size, grads in run_ranks(reduce_stages, 3, limit, None):
        for stage, own in enumerate(grads):
            for i, gradient in enumerate(own):
                expected = size * (size * ((stage + 1) * 100 + i * 10) + sum(range(size)))
                assert torch.equal(gradient, torch.full(gradient.shape, float(expected)))


def test_a_rank_that_lacks_a_gradient_brings_zeros():
    for _, grads in run_ranks(reduce_stages, 2, 1000, 1):
        assert torch.equal(grads[0][1], torch.full((5,), 2.0 * 110))


def test_without_a_group_nothing_happens():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = gradient = torch.ones(2)
    reducer = GradientReducer({0: [parameter]}, None)
    reducer.reduce(0)
    reducer.finish()
    assert parameter.grad is gradient


def test_buckets_hold_neighbours_of_one_dtype_up_to_the_limit():
    sizes = [(2, torch.float32), (3, torch.float32), (9, torch.float32), (1, torch.float32), (1, torch.bfloat16)]
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    made = buckets(parameters, torch.numel, lambda p: p.dtype, 5)
    assert [[p.numel() for p in bucket] for bucket in made] == [[2, 3], [9], [1], [1]]
    assert list(buckets([], torch.numel, lambda p: p.dtype, 5)) == []
