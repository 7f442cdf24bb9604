"""What ranks that share sequences send for attention, by hand, and what it costs. Against what they really send and
keep: tests/dist/parallel/test_context.py."""

from __future__ import annotations

import pytest

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import ContextTraffic, context_traffic
from ppctl.cost.layer_parts import attention_parts
from ppctl.cost.setting import Setting
from ppctl.cost.times import layer_seconds, layer_work, machine_of
from ppctl.geometry.layers import Kind, Layer, cp_comm_type, layer_kinds, parse_layers
from ppctl.host.accelerators import preset
from ppctl.topology import ParallelSizes

GROUPED = ModelConfig(num_attention_heads=8, num_query_groups=2, kv_channels=64)
LATENT = ModelConfig(
    num_attention_heads=8, multi_latent_attention=True, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128
)


def over(cp: int, tp: int = 1) -> ParallelSizes:
    return ParallelSizes(tp * cp, tp=tp, cp=cp, edp=tp * cp)


@pytest.mark.parametrize(
    ("model", "kind", "sizes", "levels", "sent"),
    [
        (GROUPED, "p2p", over(1), None, ContextTraffic()),
        (GROUPED, "a2a", over(1), None, ContextTraffic()),
        # A hop is 2 groups x (64 + 64) numbers for each of 100 tokens.
        (GROUPED, "p2p", over(4), None, ContextTraffic(ring=3 * 25_600)),
        (GROUPED, "p2p", over(4, tp=2), None, ContextTraffic(ring=3 * 12_800)),
        (GROUPED, "all_gather", over(4), None, ContextTraffic(gathered=3 * 25_600)),
        # Queries and results have 8 heads, keys and values 2, which are repeated for 4 ranks.
        (GROUPED, "a2a", over(2), None, ContextTraffic(heads=100 * (8 + 2) * 128 / 2, exchanging=2)),
        (GROUPED, "a2a", over(4), None, ContextTraffic(heads=100 * (8 + 4) * 128 * 3 / 4, exchanging=4)),
        (GROUPED, "a2a", over(2, tp=2), None, ContextTraffic(heads=100 * (4 + 2) * 128 / 2, exchanging=2)),
        (GROUPED, "a2a+p2p", over(8), (2, 4), ContextTraffic(3 * 25_600, 0.0, 100 * (8 + 2) * 128 / 2, 2)),
        (GROUPED, "a2a+p2p", over(8), (4, 2), ContextTraffic(2 * 25_600, 0.0, 100 * (8 + 4) * 128 * 3 / 4, 4)),
        (LATENT, "p2p", over(2), None, ContextTraffic(ring=100 * 8 * (192 + 128))),
        (LATENT, "a2a", over(2), None, ContextTraffic(heads=100 * 16 * (192 + 128) / 2, exchanging=2)),
    ],
)
def test_what_a_forward_sends(model, kind, sizes, levels, sent) -> None:
    assert context_traffic(model, kind, 100, sizes, levels) == sent


def seconds(kind: str, device: str = "h100", cp: int = 4, **sizes: int) -> tuple[float, float]:
    """Of a layer's forward and its backward without weights."""
    setting = Setting(1, 65_536, 2, over(cp), levels=(2, cp // 2))
    model = ModelConfig(hidden_size=4096, ffn_hidden_size=11_008, num_attention_heads=32, num_query_groups=8, **sizes)
    machine = machine_of(preset(device), "bfloat16", setting.sizes, model)
    found = layer_seconds(layer_work(model, Kind("decoder", False, kind), setting), machine)
    return found.forward, found.input_gradient


def test_only_a_ring_hides_behind_scores() -> None:
    ring, gathered, heads = (seconds(kind) for kind in ("p2p", "all_gather", "a2a"))
    assert ring[0] < gathered[0] and ring[1] < gathered[1]
    assert ring[0] < heads[0] and ring[1] < heads[1]
    assert gathered[1] - ring[1] == pytest.approx(2 * (gathered[0] - ring[0])), "keys again, and their gradients"
    assert heads[1] - ring[1] == pytest.approx(heads[0] - ring[0]), "a gradient for each number"


def test_neighbours_exchange_heads_on_their_fast_links() -> None:
    """16 ranks are two domains of an H100's, which 4 neighbours do not leave."""
    outside, inside = seconds("a2a", cp=16), seconds("a2a+p2p", cp=16)
    assert inside[0] < outside[0] and inside[1] < outside[1]


def test_a_list_has_a_kind_for_each_layer_and_mtp_has_the_last_ones() -> None:
    model = ModelConfig(num_layers=2, mtp_num_layers=1, cp_comm_type=["p2p", "a2a"])
    layers = parse_layers(["embedding", "decoder.0", "decoder.1", "mtp.0", "loss"])
    assert [kind.cp_comm_type for kind in layer_kinds(model, layers)] == ["p2p", "p2p", "a2a", "a2a", "p2p"]
    assert cp_comm_type(ModelConfig(num_layers=2, cp_comm_type=["a2a"]), Layer("decoder", 1)) == "a2a"


@pytest.mark.parametrize("kind", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_results_of_documents_are_kept_once(kind: str) -> None:
    """Merged blocks have one result; what exchanges heads keeps its own beside that of its heads."""
    settings = [
        Setting(1, 64, 2, sizes, packed=packed, levels=levels)
        for sizes, levels in ((over(1), None), (over(4), (2, 2)))
        for packed in (False, True)
    ]
    kept = [sum(part.size for part in attention_parts(GROUPED, setting, kind)) for setting in settings]
    result = 8 * 64 * 2
    more = {"a2a": result + 2 * 128 * 2, "a2a+p2p": result}.get(kind, 0)
    assert [kept[1] - kept[0], kept[2] - kept[0], kept[3] - kept[0]] == [result, more, more]
