"""Backwards that stay whole in the I of a split one: reported in the log, once for each stage."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import WeakSet

from torch import nn

from ppctl.weight_gradients.functions import delays

_LOG = logging.getLogger("ppctl")
_SHOWN = 8
_told: WeakSet[nn.Module] = WeakSet()


def tell_what_stays(stage: int, module: nn.Module, deferred: Sequence[nn.Parameter]) -> None:
    """Log, once for a module, which matrices' gradients are made in I: for the `on_deferred` of a stage's program.

    The share is their elements over the elements of all trained matrices, which is their share of the FLOPs of weight
    gradients if every matrix meets the same tokens. What defers its own counts as deferred.
    """
    if module not in _told:
        _told.add(module)
        _LOG.info("%s", what_stays(stage, module, deferred))


def what_stays(stage: int, module: nn.Module, deferred: Sequence[nn.Parameter]) -> str:
    """Such as `stage 1 defers 17 of 18 matrices to W; 3.1 % of weight gradients' FLOPs stay in I: router.weight`."""
    later = {id(each) for each in deferred}
    for each in module.modules():
        if delays(each):
            later |= {id(parameter) for parameter in each.parameters(recurse=False)}
    matrices = {name: p for name, p in module.named_parameters() if p.requires_grad and p.dim() > 1}
    stay = {name: p.numel() for name, p in matrices.items() if id(p) not in later}
    text = f"stage {stage} defers {len(matrices) - len(stay)} of {len(matrices)} matrices to W"
    if not stay:
        return text
    share = 100 * sum(stay.values()) / sum(p.numel() for p in matrices.values())
    names = sorted(stay, key=lambda name: -stay[name])
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{text}; {share:.3g} % of weight gradients' FLOPs stay in I: {', '.join(names[:_SHOWN])}{more}"
