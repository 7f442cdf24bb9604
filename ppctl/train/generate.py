"""Text drawn from the weights of the last checkpoint when a run has finished."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from ppctl.config.training_config import CHAT
from ppctl.data.conversation_rows import ConversationRows
from ppctl.data.load import load_tokenizer
from ppctl.data.prompts import Prompt, prompts_of
from ppctl.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from ppctl.model.draw import drawn
from ppctl.pretrained.generate import continued
from ppctl.pretrained.whole_model import open_model
from ppctl.train.session import Session

SAMPLE_LENGTH = 200
SHORT_SAMPLE_LENGTH = 32
"""Tokens drawn from a miniature of a large model, which is as deep as that."""
MOST_PARAMETERS = 250_000_000
"""Of a model that is sampled: rank 0 holds it once more, and the other ranks wait for seconds."""
_PROMPT_LENGTH = 64
_NEWLINE = ord("\n")


def write_samples(session: Session, checkpoint: Path) -> list[dict[str, str]]:
    """How the model of a `checkpoint` of the run continues each of `log.prompts`, else a line from the middle of the
    corpus or a turn of a conversation, `{prompt, text}`; none if the model is larger than `MOST_PARAMETERS`, or the
    tokens have no text. For rank 0 alone."""
    config, device, samples = session.config, session.device, list[dict[str, str]]()
    if session.plan.params_total > MOST_PARAMETERS:
        if config.log.prompts:
            print(
                f"note: log.prompts are continued by models of at most {MOST_PARAMETERS:,} parameters: ppctl generate"
            )
        return samples
    tokenizer = load_tokenizer(config.data.tokenizer)
    ends = (tokenizer.eos,) if config.data.format == CHAT else ()
    length = SAMPLE_LENGTH if config.scale is None else SHORT_SAMPLE_LENGTH
    for text, tokens in prompts_of(config, tokenizer) or _prompts_of_data(session, tokenizer):
        model = open_model(checkpoint, device, None, lambda *_: None)
        # A small model that always takes the likeliest token soon repeats one word.
        dice = torch.Generator().manual_seed(config.train.seed)
        choose = partial(drawn, dice=dice, temperature=0.8, top_k=40)
        most = length if model.longest is None else min(length, model.longest - len(tokens))
        ids = [*continued(model, tokens, most, ends, choose, device)]
        samples.append({"prompt": text, "text": tokenizer.decode(ids)})
    return samples


def _prompts_of_data(session: Session, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompt that is found in the data; none if the tokens are of another tokenizer than the config's."""
    assert session.data.training is not None  # rank 0 reads data
    corpus = session.data.training.corpora[0]
    if isinstance(corpus, ConversationRows):
        tokens = corpus.opening().tolist()
    else:
        line_end = _NEWLINE if isinstance(tokenizer, ByteTokenizer) else None
        start = [tokenizer.eos or 0] * _PROMPT_LENGTH + prompt_from(corpus.tokens, line_end).tolist()
        tokens = start[-_PROMPT_LENGTH:]
    return [Prompt(tokenizer.decode(tokens), tokens)] if max(tokens) < tokenizer.vocab_size else []


def prompt_from(tokens: Tokens, newline: int | None = _NEWLINE) -> Tokens:
    """Tokens from the middle of `tokens`, after a `newline` if one is near; fewer if there is less text. The first
    characters of a corpus are a poor prompt: a licence, a heading, an import."""
    middle = max(0, min(len(tokens) // 2, len(tokens) - 2 * _PROMPT_LENGTH))
    nearby = tokens[middle : middle + _PROMPT_LENGTH].tolist()
    begin = middle + (nearby.index(newline) + 1 if newline in nearby else 0)
    return tokens[begin : begin + _PROMPT_LENGTH]
