"""Documents packed into one sequence compute what each computes alone."""

import numpy as np
import pytest
import torch
from cuts import tiny
from hypothesis import given
from hypothesis import strategies as st

from ppctl.cost.layer_parts import attention_parts
from ppctl.cost.setting import Setting
from ppctl.data.batches import find_documents, lengths, positions
from ppctl.data.load import DocumentEnd
from ppctl.geometry.layers import parse_layers
from ppctl.model.loss import mtp_targets, token_losses
from ppctl.model.packing import ROWS, Documents, Packing
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec

END = 51
YARN = dict(rotary_scaling_factor=4.0, original_max_position_embeddings=16, mscale=0.8)
MLA = dict(
    num_query_groups=None, multi_latent_attention=True, rotary_interleaved=True, q_lora_rank=10, kv_lora_rank=14,
    qk_head_dim=6, qk_pos_emb_head_dim=8, v_head_dim=5,
)  # fmt: skip
MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=12, moe_router_topk=2, moe_aux_loss_coeff=0.0)
MODELS = {
    "grouped queries": dict(qk_layernorm=True),
    "YaRN, two MTP modules": YARN | dict(mtp_num_layers=2),
    "latent attention, YaRN, experts, MTP": MLA | YARN | MOE | dict(mtp_num_layers=1),
}


def by_definition(row):
    """Megatron's rule in one row: behind every mark, what comes after counts from 0, and is another document."""
    places, sizes = list(range(len(row))), []
    for at, token in enumerate(row):
        if token == END and at + 1 < len(row):
            places[at + 1 :] = range(len(row) - at - 1)
            sizes.append(at + 1 - sum(sizes))
    return places, (*sizes, len(row) - sum(sizes))


@given(st.lists(st.sampled_from([3, 7, END]), min_size=1, max_size=12))
def test_positions_and_documents_are_megatrons(row):
    found = positions(np.array([row, row[::-1]], dtype=np.int64), END)
    expected = [by_definition(row), by_definition(row[::-1])]
    assert found.tolist() == [places for places, _ in expected]
    assert lengths(found) == tuple(sizes for _, sizes in expected)


def whole(model):
    layers = ["embedding", *(f"decoder.{i}" for i in range(4))]
    layers += [*(f"mtp.{k}" for k in range(model.mtp_num_layers or 0)), "loss"]
    return build_stage(
        StageSpec(0, 0, 0, parse_layers(layers), (), (), 0, 0, 0), model, seed=7, dtype=torch.float32, device="cpu"
    )


def losses(stage, tokens, labels, packing=ROWS):
    """Losses of all heads at every position [heads, b, s], those of MTP where they count."""
    first, *further = stage(tokens, packing=packing)
    targets = mtp_targets(labels, torch.ones(labels.shape), len(further), packing.documents)
    later = [token_losses(each, wanted) * mask for each, (wanted, mask) in zip(further, targets, strict=True)]
    return torch.stack([token_losses(first, labels), *later])


def two_rows():
    """Rows of three and two documents, of which one is a single mark; and the token behind each row."""
    tokens = torch.randint(END, (2, 24), generator=torch.Generator().manual_seed(3))
    tokens[0, 9] = tokens[0, 10] = tokens[1, 16] = END
    return tokens[:, :-1], tokens[:, 1:]


def packed(tokens, **switches):
    places, documents = find_documents(tokens[None], DocumentEnd(END, **switches))
    return Packing(None if places is None else places[0], None if documents is None else Documents(documents[0]))


def alone(stage, tokens, labels):
    """The same losses, each document in a sequence of its own."""
    rows = []
    for row, sizes in enumerate(packed(tokens, separates=True).documents.lengths):
        parts = zip(tokens[row : row + 1].split(sizes, 1), labels[row : row + 1].split(sizes, 1), strict=True)
        rows.append(torch.cat([losses(stage, *part) for part in parts], 2))
    return torch.cat(rows, 1)


@pytest.mark.parametrize("kind", MODELS)
def test_packed_documents_have_the_losses_and_gradients_of_each_alone(kind):
    model, (tokens, labels) = tiny(**MODELS[kind]), two_rows()
    got, expected = whole(model), whole(model)
    ours = losses(got, tokens, labels, packed(tokens, restarts_positions=True, separates=True))
    theirs = alone(expected, tokens, labels)
    assert len(ours) == 1 + (model.mtp_num_layers or 0) and ((ours == 0) == (theirs == 0)).all()
    assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    ours.sum().backward()
    theirs.sum().backward()
    for (name, mine), wanted in zip(got.named_parameters(), expected.parameters(), strict=True):
        assert (mine.grad - wanted.grad).abs().max() <= 2e-6 * wanted.grad.abs().max(), name
    assert not torch.allclose(losses(got, tokens, labels), ours, rtol=1e-3)


def test_each_switch_does_one_thing():
    """Turned by differences of positions, a document kept apart does not see where it stands; one that is not does."""
    stage, (tokens, labels) = whole(tiny()), two_rows()
    both = losses(stage, tokens, labels, packed(tokens, restarts_positions=True, separates=True))
    apart = losses(stage, tokens, labels, packed(tokens, separates=True))
    restarted = losses(stage, tokens, labels, packed(tokens, restarts_positions=True))
    assert torch.allclose(apart, both, rtol=1e-5)
    assert not torch.allclose(restarted, both, rtol=1e-3)
    assert not torch.allclose(restarted, losses(stage, tokens, labels), rtol=1e-3)
    assert packed(tokens, masks_loss=True) == ROWS


def test_what_is_kept_more_is_what_the_plan_says():
    """A result for each document, beside the one for all."""
    model, (tokens, _) = tiny(), two_rows()
    stage = whole(model)
    more = kept(stage, tokens, packed(tokens, separates=True)) - kept(stage, tokens, ROWS)
    own, without = (
        sum(size for _, size in attention_parts(model, Setting(2, 23, 4, packed=apart))) for apart in (True, False)
    )
    assert more == model.num_layers * tokens.numel() * (own - without)


def kept(stage, tokens, packing):
    """Bytes that a forward keeps for its backward, each storage once; but not the kernel's sums [b, heads, s]."""
    storages = {}

    def note(tensor):
        if not (tensor.dim() == 3 and tensor.shape[1] == 4):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = stage(tokens, packing=packing)
    assert outputs
    return sum(storage.nbytes() for storage in storages.values())
