"""The loss against torch's cross entropy of all logits in float32: bits, bytes, and whose memory it writes into."""

import pytest
import torch
import torch.nn.functional as F
from cuts import tiny
from live_memory import LiveBytes, kept_by

from ppctl.cost.activations import stage_activations
from ppctl.cost.layer_parts import layer_parts
from ppctl.cost.setting import Setting
from ppctl.geometry.layers import LOSS_ROWS, Kind, Layer
from ppctl.model.linear import Linear
from ppctl.model.loss import NO_TOKEN, microbatch_loss, token_losses

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def sample(b, s, vocab_size, dtype=torch.float32):
    """(logits, labels, mask), with labels that do not count and masked tokens."""
    generator = torch.Generator().manual_seed(b * s + vocab_size)
    logits = (torch.randn(b, s, vocab_size, generator=generator) * 4).to(dtype)
    labels = torch.randint(vocab_size, (b, s), generator=generator)
    labels[torch.rand(b, s, generator=generator) < 0.1] = NO_TOKEN
    return logits, labels, (torch.rand(b, s, generator=generator) < 0.8).float()


def gradient_of(loss, logits):
    """The gradient of `loss(logits)` with respect to logits that an operation made which does not keep them."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf.clone())
    value.backward()
    return value.detach(), leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 53), (3, LOSS_ROWS, 37), (2, LOSS_ROWS + 11, 129), (1, 300, 1000)])
@pytest.mark.parametrize("total", [float, torch.tensor])
@pytest.mark.parametrize("overwrite", [False, True])
def test_loss_and_gradient_have_the_bits_of_cross_entropy_over_all_logits_in_float32(dtype, shape, total, overwrite):
    logits, labels, mask = sample(*shape, dtype)
    tokens = total(mask.sum().clamp(min=1).item())

    def whole(logits):
        each = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return (each * mask).sum() / tokens

    wanted = gradient_of(whole, logits)
    found = gradient_of(lambda logits: microbatch_loss(logits, labels, mask, tokens, overwrite=overwrite), logits)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1]) and found[1].dtype == dtype


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_logits_that_are_not_finite_give_what_cross_entropy_gives(bad):
    logits, labels, _ = sample(1, 4, 9)
    logits[0, 1, 3] = bad
    wanted = gradient_of(lambda logits: F.cross_entropy(logits[0], labels[0], reduction="none").sum(), logits)
    found = gradient_of(lambda logits: token_losses(logits, labels).sum(), logits)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, wanted, strict=True))


def test_without_a_gradient_nothing_is_kept_and_the_loss_is_the_same():
    logits, labels, _ = sample(2, 300, 40)
    logits.requires_grad_()
    with torch.no_grad():
        alone = token_losses(logits, labels, overwrite=True)
    assert alone.grad_fn is None and torch.equal(alone, token_losses(logits, labels))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "vocab_size"), [(24, 520), (520, 24)], ids=["of the block", "of the product"])
@pytest.mark.parametrize("modules", [0, 1, 2])
def test_kept_and_peak_of_head_and_loss_are_the_planned_bytes(dtype, hidden, vocab_size, modules):
    b, s = 3, 110
    n, outputs = b * s, 1 + modules
    model = tiny(hidden_size=hidden, vocab_size=vocab_size, mtp_num_layers=modules or None)
    setting = Setting(b, s, dtype.itemsize)
    head = Linear(hidden, vocab_size).to(dtype)
    torch.nn.init.normal_(head.weight, std=0.1)
    states = [torch.randn(b, s, hidden).to(dtype).requires_grad_() for _ in range(outputs)]
    _, labels, mask = sample(b, s, vocab_size)

    def loss():
        each = [microbatch_loss(head(state), labels, mask, 5.0, overwrite=True) for state in states]
        return torch.stack(each).sum()

    kept, _ = kept_by(loss)
    norm_input = n * hidden * dtype.itemsize if not modules else 0  # with MTP the final norm is elsewhere
    planned = n * sum(part.size for part in layer_parts(model, Kind("loss", False), setting)) - norm_input
    assert kept - head.weight.nbytes - mask.nbytes == planned
    head.weight.grad = None
    with LiveBytes() as live:
        out = loss()
        before, live.peak = live.now(), 0
        out.backward()
    scalars = 4 * (outputs + 2)
    more = live.peak - before
    assert more == pytest.approx(stage_activations(model, [Layer("loss")], setting).in_backward, abs=scalars)


def test_the_forward_has_no_more_than_a_block_in_float32():
    logits, labels, mask = sample(4, LOSS_ROWS, 300, torch.bfloat16)
    with LiveBytes() as live, torch.no_grad():
        microbatch_loss(logits, labels, mask, 5.0)
    assert live.peak <= 2 * 4 * LOSS_ROWS * 300 + 3 * 4 * labels.numel()


def storages_of_gradients(logits_of):
    """Whether the gradient of the logits `logits_of(leaf)` lies in their memory; the leaf's gradient; the labels."""
    logits, labels, _ = sample(2, 300, 40)
    leaf, places = logits.requires_grad_(), []

    def loss():
        made = logits_of(leaf)
        places.append(made.untyped_storage().data_ptr())
        made.register_hook(lambda gradient: places.append(gradient.untyped_storage().data_ptr()))
        return token_losses(made, labels, overwrite=True).sum()

    loss().backward()
    return places[0] == places[1], leaf.grad, labels


def capped(leaf):
    return 30 * torch.tanh(leaf / 30)


def not_contiguous(leaf):
    return (leaf * 2).transpose(0, 1).contiguous().transpose(0, 1)


def expanded(leaf):
    return (leaf * 2)[..., :1].expand_as(leaf)


@pytest.mark.parametrize(
    ("made", "overwritten"),
    [
        (capped, True),
        (torch.tanh, False),  # it keeps its result
        (torch.exp, False),
        (not_contiguous, False),
        (expanded, False),
    ],
)
def test_the_gradient_takes_the_memory_of_logits_that_nobody_else_keeps(made, overwritten):
    in_place, gradient, labels = storages_of_gradients(made)
    leaf = sample(2, 300, 40)[0].requires_grad_()
    F.cross_entropy(made(leaf).flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert in_place == overwritten and torch.equal(gradient, leaf.grad)


def test_a_second_backward_is_refused_where_the_gradient_took_the_place_of_the_logits():
    logits, labels, _ = sample(2, 300, 40)
    for overwrite in (False, True):
        leaf = logits.clone().requires_grad_()
        loss = token_losses(leaf * 1, labels, overwrite=overwrite).sum()
        loss.backward(retain_graph=True)
        first, leaf.grad = leaf.grad, None
        if overwrite:
            with pytest.raises(RuntimeError, match="overwritten by their gradient"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(leaf.grad, first)


def test_token_losses_are_float32_whatever_the_logits_are():
    logits = torch.randn(2, 3, 52).bfloat16()
    labels = torch.randint(52, (2, 3))
    losses = token_losses(logits, labels)
    assert losses.dtype == torch.float32 and losses.shape == (2, 3)
    expected = -logits.double().log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    assert torch.allclose(losses.double(), expected, atol=1e-6)


def test_microbatches_with_unlike_masks_add_up_to_the_mean_over_unmasked_tokens():
    logits, labels = torch.randn(4, 5, 52), torch.randint(52, (4, 5))
    mask = torch.zeros(4, 5)
    mask[0] = 1
    mask[2, 3] = 1
    shares = [microbatch_loss(logits[i : i + 1], labels[i : i + 1], mask[i : i + 1], 6) for i in range(4)]
    expected = token_losses(logits, labels)[mask.bool()].mean()
    assert sum(shares).item() == pytest.approx(expected.item(), rel=1e-6)
