"""Prompts as tokens: those of `ppctl generate`, and of `log.prompts`, which a run continues when it has finished."""

from __future__ import annotations

from typing import NamedTuple

from ppctl.config.schema import RunConfig
from ppctl.config.training_config import CHAT
from ppctl.data.chat_template import ChatTemplate, RenderingFailed, open_template
from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import DataError, Problem


class Prompt(NamedTuple):
    """A text to continue."""

    text: str
    """A conversation as the template writes it, up to where the assistant's answer begins."""
    tokens: list[int]


def make_prompt(
    text: str,
    tokenizer: Tokenizer,
    vocabulary: int | None,
    template: ChatTemplate | None = None,
    system: str | None = None,
) -> Prompt:
    """The prompt of `text`; with a `template`, of `text` as a user's message, after a `system` message if given.
    `vocabulary` is the model's number of tokens, if it is known. Raises DataError: PP-E420 for messages that the
    template refuses, PP-E560 for a prompt that cannot be continued."""
    said = {"system": system, "user": text}
    messages = [{"role": role, "content": content} for role, content in said.items() if content is not None]
    try:
        text = text if template is None else template.render(messages, prompt=True)[0]
        tokens = tokenizer.encode_pieces([text], around=template is None)[0].ids.tolist()
    except RenderingFailed as error:
        message = f"the chat template refuses the messages: {error}"
        raise DataError(Problem("PP-E420", message, "ppctl explain PP-E420", text)) from None
    except UnicodeEncodeError:  # bytes on the command line that are no text
        raise _refused("is not UTF-8 text", text) from None
    tokens = tokens or ([] if tokenizer.eos is None else [tokenizer.eos])
    if not tokens:
        raise _refused("is empty, and the tokenizer has no token to begin with", text)
    if vocabulary is not None and max(tokens) >= vocabulary:
        why = f"has token {max(tokens)}, but the model has only {vocabulary} tokens: it has another tokenizer"
        raise _refused(why, text)
    return Prompt(text, tokens)


def _refused(reason: str, text: str) -> DataError:
    return DataError(Problem("PP-E560", f"the prompt {reason}", "ppctl explain PP-E560", text))


def prompts_of(config: RunConfig, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompts of `log.prompts`. Raises DataError as `make_prompt` and `open_template`."""
    texts, data = config.log.prompts or (), config.data
    template = open_template(data.tokenizer, data.chat_template) if texts and data.format == CHAT else None
    return [make_prompt(text, tokenizer, config.model.vocab_size, template) for text in texts]
