"""What layers leave to the host: the planned bytes of each, once for every storage; small and living ones stay."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from ppctl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.setting import TORCH_ON_CPU, Setting, for_norms
from ppctl.geometry.layers import SMALLEST_OFFLOADED, parse_layers
from ppctl.model.offload import Copies, HostBuffers, LayerStorages, Offload, unpack
from ppctl.model.recompute import recompute
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec

LAYERS = parse_layers(["embedding", "decoder.0", "decoder.1", "decoder.2"])
DENSE = ModelConfig(
    num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=32
)
GPT3 = ModelConfig(
    num_layers=3, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=32, normalization="LayerNorm",
    add_bias_linear=True, gated_linear_unit=False, position_embedding_type="learned_absolute",
    max_position_embeddings=128,
)  # fmt: skip
WAYS = {
    "nothing": {},
    "layers": {"recompute_granularity": "full"},
    "attention": {"recompute_granularity": "selective"},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    "all": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp", "layernorm"]},
}


def run(model: ModelConfig, train: TrainConfig, layers: int) -> tuple[list[int], list[int], list[torch.Tensor]]:
    """Bytes that every layer moves, then those that it fetches, in order; all gradients."""
    stage = build_stage(StageSpec(0, 0, 0, LAYERS, (), (), 0, 0, 0), model, seed=1, dtype=torch.float32, device="cpu")
    recompute(stage, train, 0, Offload(torch.device("cpu")), LAYERS[1 : 1 + layers])
    moved: list[int] = []
    fetched: list[int] = []
    leave, give_up = LayerStorages.leave, Copies.give_up

    def noted(self: LayerStorages) -> None:
        moved.append(self.size)
        leave(self)

    def given_up(self: Copies, items, read) -> None:  # type: ignore[no-untyped-def]  # as `Copies.give_up`
        fetched.append(sum(item.size for item in items))
        give_up(self, items, read)

    with patch.object(LayerStorages, "leave", noted), patch.object(Copies, "give_up", given_up):
        (out,) = stage(torch.arange(256).view(2, 128) * 7 % 32)
        out.square().sum().backward()
    return moved, fetched, [p.grad for p in stage.parameters() if p.grad is not None]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", [DENSE, GPT3], ids=["dense", "gpt3"])
def test_every_layer_moves_its_planned_bytes_and_no_bit_changes(model: ModelConfig, way: str) -> None:
    train = TrainConfig(**WAYS[way])
    *_, expected = run(model, train, 0)
    parallel = ParallelConfig(cpu_offloading=True, cpu_offloading_num_layers=1)
    setting = Setting(2, 128, 4, allocator=for_norms(TORCH_ON_CPU, model.normalization), train=train, parallel=parallel)
    planned = stage_activations(model, LAYERS, setting).offloaded
    for layers in (2, 3):
        moved, fetched, gradients = run(model, train, layers)
        assert moved == fetched == [planned] * layers
        assert len(gradients) == len(expected) > 10
        assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))


def test_a_storage_moves_once_however_many_tensors_look_into_it() -> None:
    offload, whole = Offload(torch.device("cpu")), torch.arange(1024.0)
    layer = LayerStorages(offload, None, set())
    tensors = whole, whole[3:], whole.view(32, 32).t()
    packed = [layer.pack(tensor) for tensor in tensors]
    assert layer.size == whole.nbytes
    layer.leave()
    offload.release()
    back = [unpack(each) for each in packed]
    assert all(torch.equal(*pair) for pair in zip(back, tensors, strict=True))
    (storage,) = {tensor.untyped_storage().data_ptr() for tensor in back}
    assert storage != whole.untyped_storage().data_ptr()


def test_what_lives_anyway_and_what_is_small_stays() -> None:
    weight, small = torch.zeros(1024), torch.zeros(SMALLEST_OFFLOADED // 4 - 1)
    layer = LayerStorages(Offload(torch.device("cpu")), None, {weight.untyped_storage()._cdata})
    look = weight[5:]
    assert layer.pack(look) is look and layer.pack(small) is small and layer.size == 0
    assert layer.pack(torch.zeros(SMALLEST_OFFLOADED // 4)) is not small and layer.size == SMALLEST_OFFLOADED


def test_buffers_are_used_again() -> None:
    buffers = HostBuffers(pinned=False)
    first, _ = buffers.take(5000)
    other, _ = buffers.take(5001)
    assert first.data_ptr() != other.data_ptr() and 5001 <= other.numel() <= 5001 * 9 // 8
    buffers.give_back(first, None)
    again, _ = buffers.take(5002)
    assert again.data_ptr() == first.data_ptr() and buffers.bytes == 2 * first.numel()


def test_buffers_for_more_microbatches_are_made_before_they_are_needed() -> None:
    buffers = HostBuffers(pinned=False)
    taken = [buffers.take(size) for size in (5000, 5000, 9000)]
    for each in taken:
        buffers.give_back(*each)
    buffers.multiply(3)
    made = buffers.bytes
    assert made == 3 * sum(each.buffer.numel() for each in taken)
    addresses = {buffers.take(size).buffer.data_ptr() for size in (5000, 5000, 9000) * 3}
    assert len(addresses) == 9 and buffers.bytes == made
