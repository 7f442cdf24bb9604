"""A user's own modules, which know nothing of pipelines: as in a script, and as torchtitan and NeMo write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, WIDTH, LAYERS, LENGTH = 50, 16, 4, 10

PARTS = {
    2: [["embed", "position", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "head"]],
    4: [["embed", "position"], ["layers.0", "layers.1"], ["layers.2"], ["layers.3", "norm", "head"]],
}


class Block(nn.Module):
    """A residual block that also reads a mask made of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        if self.training:
            self.calls += 1
        return x + torch.tanh(self.map(self.norm(x))) * mask, mask


class Net(nn.Module):
    """Scales, masks and positions of its own, layers that return tuples, code between the modules of two parts."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens) * 4.0 + self.position(torch.arange(length, device=tokens.device))
        mask = (tokens != 0)[..., None].to(x.dtype)
        for layer in self.layers:
            x, _ = layer(x, mask)
            x = x * 0.9
        return self.head(self.norm(x)) * 0.5


class Aware(nn.Module):
    """A model whose forward takes hidden states itself: modules of other stages are None."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x) * 3.0
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x if self.head is None else self.head(x)


class AwareInside(nn.Module):
    """A causal language model that takes hidden states itself, around an inner model that does not, or that does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model, self.head = inner, nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.model(x)
        return x if self.head is None else self.head(x)


class Step(nn.Module):
    """A residual inside one module."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.map(x))


class Plain(nn.Module):
    """The inner model of a causal language model, in no way prepared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Step() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) * 3.0
        for layer in self.layers:
            x = layer(x) * 0.9
        return x


class Around(nn.Module):
    """A causal language model that knows nothing of stages, around an inner model that takes hidden states."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model, self.head = inner, nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x)) * 0.5


class InnerAware(nn.Module):
    """An inner model that takes hidden states itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def made(kind: str) -> nn.Module:
    """A model by its kind, always with the same weights."""
    torch.manual_seed(3)
    kinds = {
        "plain": Net,
        "tied": lambda: Net(tied=True),
        "aware": Aware,
        "aware outside": lambda: AwareInside(Plain()),
        "aware inside": lambda: Around(InnerAware()),
    }
    return kinds[kind]()


def batches(steps: int, rows: int) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels) [rows, LENGTH] of every step; some labels do not count."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        labels = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
        labels[0, :3] = -100
        found.append((tokens, labels))
    return found
