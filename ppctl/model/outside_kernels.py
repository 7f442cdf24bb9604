"""Kernels that are not ppctl's: values in a person's own module, which `model.kernels` names and ranks import.

docs/kernels.md has an example; decision 81 says why there is no list of registered ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from ppctl.errors import ConfigError, Problem, pasted

T = TypeVar("T")
Role = Literal["attention", "grouped_product", "dispatch", "norm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelUse:
    """The sizes and options of a run on each rank. Sizes are of the rank's own part; 0 if the model has none."""

    device: str
    """`cuda` or `cpu`."""
    compute: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (9, 0) is Hopper."""
    dtype: torch.dtype = torch.float32
    """The dtype of activations and weights."""
    length: int = 16
    """Tokens of a row, `hidden` wide."""
    hidden: int = 16
    heads: int = 2
    """Heads of queries, as wide as those of keys; `groups` is the number of heads of keys and values."""
    groups: int = 2
    width: int = 8
    values_width: int = 8
    experts: int = 0
    """The number of routed experts; each is `expert_width` wide between its products."""
    expert_width: int = 0
    bias: bool = False
    """Whether norms are LayerNorm, with a bias; else RMSNorm. `epsilon` is the norms' epsilon."""
    epsilon: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel for one role: `model.kernels=[module:name]` names a value of this class in a module.

    `function` is differentiated by autograd, and must not depend on anything but its arguments: recomputation calls it
    again. Gradients that its backward returns are given away: ppctl adds to them in place. By role it is

    * attention: (q [b, heads, s, width], k [b, groups, s, width], v [b, groups, s, values' width], scale) -> [b, heads,
      s, values' width], causal;
    * grouped_product: (rows [n, in], weights [groups, out, in], ends [groups] int32) -> [n, out], group g's rows, which
      end before ends[g], times the transpose of its weight. A group may have no rows;
    * norm: (x [..., h], weight [h], bias [h] or None, epsilon) -> x's shape;
    * dispatch: (axis -> process group, the model's config) -> what `ppctl.model.feed_forward.ExchangeRows` describes;
      there are groups of `ep`, `etp`, `ep-outer` and `ep-inner` if these axes have several ranks.
    """

    role: Role
    function: Callable[..., Any]
    tolerance: float
    """The largest difference from the reference, of results and gradients, as a share of the reference's largest value
    (`ppctl.check_kernel`)."""
    fits: Callable[[KernelUse], str] | None = None
    """Returns why the kernel cannot serve a use, or "" if it can. None: the kernel serves every use."""
    name: str = ""
    """The kernel's name in the config; set if the config chooses it."""

    def against(self, use: KernelUse) -> str:
        """The reason that `fits` returns for a use; empty if there is none."""
        return "" if self.fits is None else self.fits(use)


def choose_outside(names: Sequence[str], use: KernelUse, *, compiles: bool = False) -> dict[str, Kernel]:
    """Role -> the first kernel of `names` for it that fits. With `compiles` torch.compile leaves the kernels out.

    Raises ConfigError (PP-E773) if a name leads to no kernel, a `fits` fails, or none of a role's kernels fits.
    """
    chosen: dict[str, Kernel] = {}
    against: dict[str, str] = {}
    kernels = [replace(load_kernel(name), name=name) for name in names]
    for kernel in kernels:
        if reason := _or_refuse(f"{kernel.name} fails in its fits", partial(kernel.against, use)):
            against[kernel.role] = f"{kernel.name} cannot serve: {reason}"
        elif kernel.role not in chosen:
            function = torch.compiler.disable(kernel.function) if compiles else kernel.function
            chosen[kernel.role] = replace(kernel, function=function)
    for role in against.keys() - chosen.keys():
        raise refusal(against[role], [kernel.name for kernel in kernels if kernel.role != role])
    return chosen


def load_kernel(name: str) -> Kernel:
    """The kernel that `module:name` names; imports the module, from where Python finds it. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    found = _or_refuse(f"{name} cannot be imported", lambda: getattr(importlib.import_module(module), attribute))
    if not isinstance(found, Kernel):
        raise refusal(f"{name} is no ppctl.Kernel, but {type(found).__name__}")
    return found


def _or_refuse(message: str, ask: Callable[[], T]) -> T:
    """The result of a person's code. Raises ConfigError (PP-E773) with `message` for any error of it."""
    try:
        return ask()
    except (Exception, SystemExit) as error:
        raise refusal(f"{message}: {type(error).__name__}: {error}") from error


def refusal(message: str, rest: Sequence[str] = ()) -> ConfigError:
    """The error of a kernel that does not serve; the remedy names the kernels `rest`."""
    value = f"[{','.join(rest)}]" if rest else "null"
    return ConfigError(Problem("PP-E773", message, pasted(f"model.kernels={value}")))


def use_norm(module: nn.Module, kernel: Kernel) -> None:
    """Let every norm inside a module compute by the kernel; their weights stay where they are."""
    for norm in module.modules():
        if isinstance(norm, nn.RMSNorm | nn.LayerNorm):
            norm.forward = partial(_normed, norm, kernel.function)  # type: ignore[method-assign]


def _normed(norm: nn.RMSNorm | nn.LayerNorm, function: Callable[..., Any], x: torch.Tensor) -> Any:
    return function(x, norm.weight, getattr(norm, "bias", None), norm.eps)
