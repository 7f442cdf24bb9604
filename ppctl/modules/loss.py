"""The loss of a step: of a function of the user's, or cross entropy.

Knows outputs and labels. Must not know schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ppctl.config.pipeline_config import PipelineConfig
from ppctl.errors import ConfigError, Problem
from ppctl.model.loss import NO_TOKEN, microbatch_loss
from ppctl.modules.batch import Microbatch


class StepLoss:
    """Each microbatch's share of a step's loss, whose sum over the step is the loss that is differentiated.

    With `loss_fn` a share is `loss_fn(output, labels)`, with scale_grads_in_schedule divided by the number of
    microbatches. Without, it is cross entropy in nats over the tokens that count, divided by their number in the whole
    batch; with scale_grads_in_schedule the mean over the microbatch's own, divided by the number of microbatches.
    """

    def __init__(self, config: PipelineConfig, microbatches: Sequence[Microbatch]) -> None:
        self.function, self.shares = config.loss_fn, len(microbatches) if config.scale_grads_in_schedule else 1
        self.scales = config.scale_grads_in_schedule
        self.total: Tensor | None = None
        if self.function is None:
            if not all(_are_tokens(each.labels) for each in microbatches):
                message = "without loss_fn the labels are token ids [rows, tokens], int64, -100 where none counts"
                raise ConfigError(Problem("PP-E130", message, "PipelineConfig(loss_fn=torch.nn.functional.mse_loss)"))
            if not self.scales:
                self.total = torch.stack([_mask(each.labels).sum() for each in microbatches]).sum().clamp(min=1)

    def try_out(self, output: Any, labels: Any, device: torch.device) -> None:
        """Raise ConfigError (PP-E130) where no loss can be taken of such a result, which is without values.

        A `loss_fn` is called once with zeros, ahead of all messages: what it raises is raised here.
        """
        if self.function is None:
            self._check(output, labels)
            return
        if not all(isinstance(each, Tensor) for each in tree_leaves(output)):
            return  # of an object of the model's own, which zeros cannot stand for
        zeros = tree_map(
            lambda each: torch.zeros_like(each, device=device).requires_grad_(each.is_floating_point()), output
        )
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            found = self.function(zeros, labels)
        if not isinstance(found, Tensor) or found.dim():
            what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            remedy = "loss_fn=lambda output, labels: torch.nn.functional.mse_loss(output, labels)"
            raise ConfigError(Problem("PP-E130", f"loss_fn returns {what}, but a loss is one number", remedy))

    def _check(self, output: Any, labels: Any) -> None:
        """Raise ConfigError (PP-E130) for a result that cross entropy cannot be taken of."""
        logits = _logits_of(output)
        if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != labels.shape:
            what = list(logits.shape) if isinstance(logits, Tensor) else type(output).__name__
            message = f"without loss_fn the model returns logits [rows, tokens, words] for labels {list(labels.shape)}"
            raise ConfigError(Problem("PP-E130", f"{message}, not {what}", "PipelineConfig(loss_fn=your_loss)"))

    def __call__(self, output: Any, labels: Any) -> Tensor:
        """The share of one microbatch."""
        if self.function is not None:
            loss: Tensor = self.function(output, labels)
        else:
            self._check(output, labels)
            logits = _logits_of(output)
            mask = _mask(labels)
            wanted = labels.masked_fill(labels == NO_TOKEN, 0)  # other negative ones are no tokens: torch refuses them
            loss = microbatch_loss(logits, wanted, mask, mask.sum().clamp(min=1) if self.total is None else self.total)
        return loss / self.shares if self.scales else loss


def _logits_of(output: Any) -> Any:
    return output if isinstance(output, Tensor) else getattr(output, "logits", None)


def _are_tokens(labels: Any) -> bool:
    return isinstance(labels, Tensor) and labels.dim() == 2 and labels.dtype == torch.int64


def _mask(labels: Tensor) -> Tensor:
    return (labels != NO_TOKEN).float()
