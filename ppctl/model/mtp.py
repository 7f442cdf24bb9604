"""Multi-token prediction: modules beside the decoder that each predict one token further (DeepSeek-V3,
arXiv:2412.19437).

Attribute names are canonical parameter names: renaming one renames a checkpoint key.

Module k (from 0) takes at position i the hidden state of the module before it (first: the decoder's, after the final
norm) and the embedding of token i + k + 1; the output projection turns its result into logits for token i + k + 2. If
documents are kept apart, the modules treat a document's end like the end of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import mtp_is_moe
from ppctl.model.dropout import Draws, Dropout
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.layer import DecoderLayer
from ppctl.model.linear import Embedding, Linear
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents


def ahead(x: Tensor, count: int, documents: Documents | None = None) -> Tensor:
    """`x` [b, s] read `count` positions further on; zeros if the sequence, or the document, has ended."""
    if documents is not None:
        return documents.each(lambda part: ahead(part, count), x, dim=1)
    return F.pad(x[:, count:], (0, min(count, x.shape[1])))


class PredictionModule(nn.Module):
    """norm(decoder layer(projection of (norm(embedding), norm(hidden)))): [b, s, h] -> [b, s, h]."""

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        h = model.hidden_size
        self.after_embedding = Dropout(model.hidden_dropout)
        self.enorm = make_norm(model, h)
        self.hnorm = make_norm(model, h)
        self.eh_proj = Linear(2 * h, h)
        self.layer = DecoderLayer(model, moe=mtp_is_moe(model), kernels=kernels)
        self.norm = make_norm(model, h)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        turns: Tensor,
        documents: Documents | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """The hidden state [b, s, hidden] for one token further on, from `hidden` and the next tokens, `embedded` (both
        of that shape). The other arguments are a decoder layer's."""
        embedded = self.after_embedding(embedded, draws)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        out: Tensor = self.norm(self.layer(x, turns, documents, draws))
        return out


class MultiTokenPrediction(nn.ModuleDict):
    """All modules of the model, which stand on one stage, and the copy of the embedding that they share."""

    def __init__(self, model: ModelConfig, ids: Iterable[str], kernels: Kernels = ON_CPU) -> None:
        super().__init__({"tok_embeddings": Embedding(model.vocab_size, model.hidden_size)})
        self.ids = list(ids)
        self.own: Callable[[Tensor], Tensor] = lambda tokens: tokens
        """Token ids [b, s], already read `ahead` -> the part that this rank has, if several share sequences."""
        self.update({id_: PredictionModule(model, kernels) for id_ in self.ids})

    def forward(
        self,
        hidden: Tensor,
        tokens: Tensor,
        turns: Tensor,
        documents: Documents | None = None,
        draws: Draws | None = None,
    ) -> tuple[Tensor, ...]:
        """One hidden state [b, s, h] per module, from the decoder's hidden state and its inputs' token ids [b, s]."""
        states = []
        for depth, id_ in enumerate(self.ids, 1):
            embedded = self["tok_embeddings"](self.own(ahead(tokens, depth, documents)))
            hidden = self[id_](hidden, embedded, turns, documents, draws)
            states.append(hidden)
        return tuple(states)
