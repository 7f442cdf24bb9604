"""Bugs of composed axes that others had, each as a test: their losses looked right, or nearly so.

In float64 against one process. Megatron-LM #7452 lists several; further sources stand at the tests.
"""

from functools import cache

import numpy as np
import pytest
from axis_runs import SEQ, batch, config_of, differences, reference, train_all, world_of
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.sequence_halves import Halves

RUNS = {
    "mtp, cp": ("packed", dict(cp=2)),
    "cp": ("grouped", dict(cp=2)),
    "sp": ("grouped", dict(tp=2, sp=True)),
    "tied": ("biases", dict(pp=2, layout="Et*2|t*2L")),
    "tied, mtp": ("latent", dict(pp=2, layout="Et*2|t*2mmL")),
    "experts, sp": ("experts", dict(tp=2, sp=True)),
    "ep": ("experts", dict(dp=2, ep=2)),
    "ep, sp": ("experts", dict(tp=2, sp=True, dp=2, ep=2, etp=1)),
}
SAME = 1e-12


@cache
def results(world):
    configs = {run: config_of(kind, **axes) for run, (kind, axes) in RUNS.items()}
    chosen = {run: to_mapping(config) for run, config in configs.items() if world_of(config) == world}
    ranks = run_ranks(train_all, world, list(chosen.values()), timeout=110)
    return {run: [rank[number] for rank in ranks] for number, run in enumerate(chosen)}


def ranks_of(run):
    return results(world_of(config_of(RUNS[run][0], **RUNS[run][1])))[run]


def far(run, *wanted):
    """What of a run has one of these words in its name -> how far it is from one process."""
    found = differences(RUNS[run][0], ranks_of(run))
    chosen = {what: value for what, value in found.items() if any(word in what for word in wanted)}
    assert chosen
    return chosen


def gradients_of(run):
    """Of the first step, by name."""
    return {name: value for rank in ranks_of(run) for name, value in rank["gradients"].items()}


def norm_of(gradients, names):
    return np.sqrt(sum(np.square(gradients[name]).sum() for name in names))


pytestmark = pytest.mark.timeout(120)


def test_ranks_that_share_sequences_count_unequal_numbers_of_tokens():
    """Or the two tests below could not fail."""
    mask = batch(1, 37)[2]
    halves = [Halves(rank, 2, SEQ).positions for rank in range(2)]
    assert len({float(sum(mask[..., list(half)].sum() for half in own)) for own in halves}) == 2


def test_mtp_loss_is_divided_by_the_tokens_of_the_whole_batch():
    """Megatron-LM #7452: each rank divided by its own count; a gradient was 14/3 in place of 4."""
    assert max(far("mtp, cp", "mtp_loss", "gradients mtp.").values()) <= SAME


def test_loss_over_cp_is_divided_by_the_tokens_of_the_whole_batch():
    """Megatron-LM #7513: each shard was divided by its own count; one counted token in all had half its gradient."""
    assert max(far("cp", "loss", "gradients").values()) <= SAME


def test_learnable_vectors_count_in_the_norm():
    """Megatron-LM #7530: attention sinks were missing in the norm that clips."""
    for run in ("sp", "tied"):
        gradients = gradients_of(run)
        once = [name for name in gradients if name != "output.weight" or run == "sp"]
        matrices = [name for name in once if gradients[name].ndim > 1]
        norm = ranks_of(run)[0]["records"][0]["grad_norm"]
        assert abs(norm - norm_of(gradients, once)) <= SAME * norm
        assert abs(norm - norm_of(gradients, matrices)) > 1e-6 * norm


def test_norms_of_queries_and_keys_have_the_gradients_of_all_heads():
    """They see the heads of their rank alone, with sequence parallelism and without (Megatron-LM #7452)."""
    assert max(far("sp", "q_norm", "k_norm").values()) <= SAME


def test_a_tied_weight_counts_once_in_the_norm():
    """Megatron-LM #7227: 40 in place of 28.28, where the stages of both uses added it."""
    for run in ("tied", "tied, mtp"):
        assert max(far(run, "norm", "clip", "gradients tok_embeddings").values()) <= SAME
        gradients = gradients_of(run)
        once = [name for name in gradients if name not in ("output.weight", "mtp.tok_embeddings.weight")]
        norm = reference(RUNS[run][0]).norms[0]
        assert abs(norm - norm_of(gradients, once)) <= SAME * norm
        assert abs(norm - norm_of(gradients, gradients)) > 1e-3 * norm


def test_experts_count_in_the_norm_at_ep_and_tp():
    """Megatron-LM #5916; DeepSpeed #8478: 7.236 in place of 10.954, where ranks' norms were averaged."""
    assert max(far("ep, sp", "norm", "clip", ".experts.").values()) <= SAME


def test_routers_have_the_gradients_of_all_tokens_at_tp_without_ep():
    """torchtitan #4054: the forward was untouched, the loss normal, and the gates' gradient a rank's part."""
    assert max(far("experts, sp", "loss", "router").values()) <= SAME


def test_experts_at_ep_2_have_their_gradient_once():
    """pytorch #160285: it was twice the right one; Megatron-LM #6660: 2^N times."""
    assert max(far("ep", "gradients").values()) <= SAME


@pytest.mark.parametrize("run", RUNS)
def test_all_ranks_clip_by_one_factor(run):
    """Automodel #3817: groups of ranks had norms and factors of their own, and replicas drifted apart."""
    expected, ranks = reference(RUNS[run][0]).scales, ranks_of(run)
    assert min(expected) < 1, "nothing is clipped: the test could not fail"
    for rank in ranks:
        assert rank["scales"] == pytest.approx(expected, rel=SAME, abs=0)
        assert rank["records"][-1]["grad_norm"] == ranks[0]["records"][-1]["grad_norm"]
