"""What a rank sends in a microbatch and once a step, by hand. Against what ranks really send: tests/dist/train.

Everywhere 8 tokens of 16 numbers in float32: a hidden state has 512 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from ppctl.config.schema import ModelConfig, TrainConfig
from ppctl.cost.setting import Setting
from ppctl.cost.step_traffic import Stages, Sums, buckets, once_a_step
from ppctl.cost.traffic import Traffic, layer_passes, stage_passes
from ppctl.geometry.layers import Kind, parse_layers
from ppctl.topology import ParallelSizes

HIDDEN = 512
DENSE = ModelConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, num_query_groups=4, vocab_size=40
)
EXPERTS = ModelConfig(
    **{name: getattr(DENSE, name) for name in ("num_layers", "hidden_size", "num_attention_heads", "num_query_groups")},
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=8, moe_aux_loss_coeff=0.01, vocab_size=40,
)  # fmt: skip
LATENT = ModelConfig(
    hidden_size=16, num_attention_heads=4, multi_latent_attention=True, q_lora_rank=6, kv_lora_rank=4, qk_head_dim=4,
    qk_pos_emb_head_dim=2, v_head_dim=4,
)  # fmt: skip


def setting(*, sp: bool = False, train: TrainConfig | None = None, **sizes: int) -> Setting:
    return Setting(1, 8, 4, over(**sizes), sequence_parallel=sp, train=train or TrainConfig())


def over(pp: int = 1, tp: int = 1, cp: int = 1, dp: int = 1, ep: int = 1, etp: int = 1) -> ParallelSizes:
    ranks = tp * cp * dp
    return ParallelSizes(pp * ranks, pp=pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, edp=ranks // (ep * etp))


def layer(model: ModelConfig, kind: Kind, **how: int) -> list[dict]:
    """Of the forward, the backward without weights' gradients, and these."""
    return [dict(part.shown) for part in layer_passes(model, kind, setting(**how))]


BLOCK = Kind("decoder", False)


def test_without_others_nothing_is_sent() -> None:
    assert layer(DENSE, BLOCK) == [{}, {}, {}]


def test_a_block_over_two_ranks_has_one_sum_for_each_half_and_pass() -> None:
    summed = {("tp", "all_reduce"): (2, 2 * HIDDEN)}  # 2 x 512 x 1/2 bytes each
    assert layer(DENSE, BLOCK, tp=2) == [summed, summed, {}]


def test_sequence_parallelism_gathers_and_scatters_and_gathers_again_for_weights() -> None:
    both = {("tp", "all_gather"): (2, 2 * HIDDEN * 3 / 4), ("tp", "reduce_scatter"): (2, 2 * HIDDEN * 3 / 4)}
    assert layer(DENSE, BLOCK, tp=4, sp=True) == [both, both, {("tp", "all_gather"): (2, 2 * HIDDEN * 3 / 4)}]


def test_compressed_vectors_are_gathered_by_their_widths() -> None:
    """Queries 6, keys and values 4, turned keys 2; then the feed-forward's 16."""
    forward, inputs, weights = layer(LATENT, BLOCK, tp=2, sp=True)
    token = 8 * 4 / 2
    assert forward == {("tp", "all_gather"): (4, (6 + 4 + 2 + 16) * token), ("tp", "reduce_scatter"): (2, HIDDEN)}
    assert inputs == {("tp", "all_gather"): (2, HIDDEN), ("tp", "reduce_scatter"): (4, (6 + 4 + 2 + 16) * token)}
    assert weights == {("tp", "all_gather"): (3, (6 + 4 + 16) * token)}, "turned keys are read by no product"


@pytest.mark.parametrize(
    ("way", "forward", "backward"),
    [
        ("p2p", {("cp", "send"): (1, HIDDEN)}, {("cp", "send"): (2, 2 * HIDDEN)}),
        (
            "all_gather",
            {("cp", "all_gather"): (1, HIDDEN)},
            {("cp", "all_gather"): (1, HIDDEN), ("cp", "reduce_scatter"): (1, HIDDEN)},
        ),
        ("a2a", {("cp", "all_to_all"): (2, HIDDEN)}, {("cp", "all_to_all"): (2, HIDDEN)}),
    ],
)
def test_keys_and_values_or_heads_go_along_cp(way: str, forward: dict, backward: dict) -> None:
    """4 tokens of each rank: keys and values have 4 x 2 x 16 numbers, with queries and results twice as many, of which
    half goes to the other rank."""
    assert layer(DENSE, Kind("decoder", False, way), cp=2) == [forward, backward, {}]


def test_rows_go_to_experts_and_back() -> None:
    """4 tokens of each rank under sp, each to 2 experts: 8 rows of 64 bytes with a weight of 4, of which half stay;
    beside them counts of 4 experts, and of the auxiliary loss twice 4 numbers."""
    forward, inputs, _ = layer(EXPERTS, Kind("decoder", True), tp=2, sp=True, ep=2)
    assert forward["ep", "all_to_all"] == (4, 8 * 4 / 2 + 8 * (2 * 64 + 4) / 2)
    assert inputs["ep", "all_to_all"] == (3, 8 * (2 * 64 + 4) / 2)
    assert forward["tp", "all_reduce"] == (1, 2 * 4 * 4 / 2)
    divided, back, _ = layer(EXPERTS, Kind("decoder", True), tp=2, sp=True, etp=2)
    assert divided["etp", "all_gather"] == (1, 8 * 4)
    assert divided["etp", "all_to_all"] == back["etp", "all_to_all"] == (3, 8 * (2 * 64 + 4))


def test_by_node_a_row_crosses_the_network_once_for_each_node() -> None:
    """4 experts in runs of one on 2 nodes of one rank each: of 2 different experts 5 / 3 nodes and 2 runs have some."""
    by_node = setting(sp=True, tp=2, ep=2)._replace(nodes=2)
    forward, inputs, _ = layer_passes(EXPERTS, Kind("decoder", True), by_node)
    there, back = 4 * 5 / 3, 4 * 2
    assert forward["ep", "all_to_all"] == (1, 8 * (4 / 2 + 2))
    rows = (there + back) * 64 / 2 + there * 2 * 4 / 2
    assert inputs["ep-outer", "all_to_all"] == (3, pytest.approx(rows))
    assert forward["ep-outer", "all_to_all"] == (4, pytest.approx(rows + there * 2 * 4 / 2))
    assert ("ep-inner", "all_to_all") not in forward


def test_deepseeks_exchange_is_206_mb_in_place_of_411() -> None:
    """ep 64 on 8 nodes, a router that is limited to 4 of 8 groups; without the counts and the rows' experts."""
    deepseek = ModelConfig(
        hidden_size=7168, num_attention_heads=128, num_moe_experts=256, moe_router_topk=8, moe_ffn_hidden_size=2048,
        moe_router_num_groups=8, moe_router_group_topk=4, moe_layer_freq=1, num_layers=1, moe_aux_loss_coeff=0.0,
    )  # fmt: skip
    flat = Setting(1, 4096, 2, ParallelSizes(64, dp=64, ep=64))
    _, of_copies = layer_passes(deepseek, Kind("decoder", True), flat).inputs["ep", "all_to_all"]
    _, by_node = layer_passes(deepseek, Kind("decoder", True), flat._replace(nodes=8)).inputs["ep-outer", "all_to_all"]
    weights = 4096 * 8 * 2
    outside = (of_copies - weights * 63 / 64) * (56 / 64) / (63 / 64)
    assert outside / 2 == pytest.approx(411e6, rel=0.002)
    assert (by_node - 4 * weights * 7 / 8) / 2 == pytest.approx(206e6, rel=0.003)


def test_a_divided_vocabulary_sums_three_numbers_a_token() -> None:
    forward, inputs, weights = layer(DENSE, Kind("loss", False), tp=2)
    assert forward == {("tp", "all_reduce"): (2, 8 * 4 + 2 * 8 * 4)}
    assert inputs == {("tp", "all_reduce"): (1, HIDDEN)} and weights == {}
    assert layer(DENSE, Kind("embedding", False), tp=2) == [{("tp", "all_reduce"): (1, HIDDEN)}, {}, {}]


def test_what_is_recomputed_is_exchanged_again_but_for_its_last_sum() -> None:
    layers, full = parse_layers(["decoder.0", "decoder.1"]), TrainConfig(recompute_granularity="full")
    full.recompute_method, full.recompute_num_layers = "uniform", 1
    plain = stage_passes(DENSE, layers, setting(tp=2)).all
    again = stage_passes(DENSE, layers, setting(tp=2, train=full)).all
    assert dict(plain.shown) == {("tp", "all_reduce"): (8, 8 * HIDDEN)}
    assert dict(again.shown) == {("tp", "all_reduce"): (10, 10 * HIDDEN)}


def once(model: ModelConfig, stages: list[list[str]], sums: Sums, pp_rank: int = 0, **sizes: int) -> Traffic:
    *_, own = islice(Stages.each(model, [[parse_layers(chunk)] for chunk in stages]), pp_rank + 1)
    return once_a_step(model, own, over(**sizes), sums, sequence_parallel=sizes.get("tp", 1) > 1)


WHOLE = ["embedding", "decoder.0", "decoder.1", "loss"]
NUMBERS = 2 * 40 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 24 + 2 * 16) + 16
"""Parameters of DENSE: tables, matrices, norms."""
PLAIN = Sums("none", 4, 4, scatters=True)
REPORT = 8 * (14 + 1)
"""Bytes of a rank's report: 14 numbers, and the seconds of one stage."""


def test_one_rank_tells_nobody_anything() -> None:
    assert once(DENSE, [WHOLE], PLAIN) == {}


def test_replicas_sum_gradients_and_tell_their_reports() -> None:
    assert dict(once(DENSE, [WHOLE], PLAIN, dp=4).shown) == {
        ("dp", "all_gather"): (1, 3 * REPORT),
        ("dp", "all_reduce"): (1, round(2 * NUMBERS * 4 * 3 / 4)),
    }


def test_shards_take_sums_in_parts_norms_of_parts_and_weights_back() -> None:
    found = once(DENSE, [WHOLE], Sums("optimizer_gradients", 4, 2, scatters=True), dp=2)
    tensors = 2 + 1 + 2 * (4 + 3 + 2)
    assert dict(found.shown) == {
        ("dp", "all_gather"): (2, REPORT + NUMBERS / 2 * 2),
        ("dp", "reduce_scatter"): (1, NUMBERS / 2 * 4),
        ("dp", "all_reduce"): (1, 2 * 4 * tensors / 2),
    }


def test_stages_tell_reports_and_norms_and_those_that_share_a_table_its_gradients() -> None:
    tied = replace(DENSE, share_embeddings_and_output_weights=True)
    stages = [["embedding", "decoder.0"], ["decoder.1"], ["loss"]]
    first, middle, last = (dict(once(tied, stages, PLAIN, rank, pp=3).shown) for rank in range(3))
    norms = 4 * (1 + 9)  # of the table and a layer's 4 + 3 matrices and 2 norms, the longest of the three lists
    assert first["pp", "all_gather"] == (2, 2 * (REPORT + norms))
    assert first["ties", "broadcast"] == last["ties", "broadcast"] == (2, 2 * 40 * 16 * 4 / 2)
    assert middle == {("pp", "all_gather"): (2, 2 * (REPORT + norms))}


def test_tensor_parallel_ranks_sum_gradients_of_norms_and_norms_of_gradients() -> None:
    """Of 5 norms; squares of 2 tables and 14 matrices."""
    found = once(DENSE, [WHOLE], PLAIN, tp=2)
    assert dict(found.shown) == {
        ("tp", "all_gather"): (1, REPORT),
        ("tp", "all_reduce"): (2, 2 * 5 * 16 * 4 / 2 + 2 * (2 + 14) * 4 / 2),
    }


def test_counts_that_move_biases_are_summed_over_all_that_route_other_tokens() -> None:
    moved = replace(EXPERTS, moe_router_enable_expert_bias=True, moe_aux_loss_coeff=0.0)
    still = replace(moved, moe_router_enable_expert_bias=False)
    counts = Traffic().add(once(moved, [WHOLE], PLAIN, cp=2)).add(once(still, [WHOLE], PLAIN, cp=2), -1)
    assert dict(counts.shown) == {("cp", "all_reduce"): (1, 2 * 8 * 2 * 4 / 2)}
    with_losses = once(EXPERTS, [WHOLE], PLAIN, cp=2)["cp", "all_gather"]
    assert with_losses == (1, REPORT + 2 * 8), "two routers' losses are reported"


def test_buckets_hold_neighbours_up_to_a_limit() -> None:
    assert list(buckets([3, 3, 5, 9, 1, 1], limit=6)) == [[3, 3], [5], [9], [1, 1]]
