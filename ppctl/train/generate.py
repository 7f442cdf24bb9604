"""Text drawn from the trained stages, through the forward-only schedule on the same ranks.

There is no cache: every token takes a forward of the whole window, the same as in training.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ppctl.comm.buffers import Message
from ppctl.config.training_config import CHAT
from ppctl.data.batches import StepBatch, find_documents
from ppctl.data.conversation_rows import ConversationRows
from ppctl.data.load import load_tokenizer
from ppctl.data.prompts import Prompt, prompts_of
from ppctl.data.tokenizer import ByteTokenizer, Tokenizer, Tokens
from ppctl.engine.interpreter import run_schedule
from ppctl.model.draw import drawn
from ppctl.parallel.tensor import gather_runs
from ppctl.sequence_halves import Halves
from ppctl.tensors.tensor_halves import own_positions
from ppctl.train.programs import StagePrograms
from ppctl.train.session import Session


class Generator(StagePrograms):
    """Continues a prompt of token ids by the programs of training, with a draw in place of a loss. A collective of one
    pipeline: all its ranks call it with the same prompt."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.schedule = session.plan.forward_only(num_microbatches=1)
        self.programs = [self._program(spec, 0) for spec in session.own.stages]
        length, samples = session.config.data.seq_length, session.config.train.micro_batch_size
        # The edges were planned for this shape; every row holds the same window.
        self.window = torch.zeros(1, samples, length, dtype=torch.int64, device="cpu")
        self.position = 0
        self.next_token = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.dice = torch.Generator().manual_seed(session.config.train.seed)
        self.last_rank = dist.get_global_rank(session.groups["pp"], session.plan.stages[-1].pp_rank)

    def continue_prompt(self, prompt: Sequence[int], count: int, end: int | None = None) -> list[int]:
        """The `count` tokens that follow `prompt` (at least one token), drawn by the seed and the weights alone; fewer
        if `end` is drawn, which is left out."""
        tokens = list(prompt)
        for _ in range(count):
            token = self._next(tokens)
            if token == end:
                break
            tokens.append(token)
        return tokens[len(prompt) :]

    def _next(self, tokens: Sequence[int]) -> int:
        seen = tokens[-self.window.shape[-1] :]
        self.position = len(seen) - 1
        # Later positions do not matter: attention is causal.
        self.window[..., : len(seen)] = torch.tensor(seen, device="cpu")
        documents = find_documents(self.window, self.session.data.end)
        self.begin(StepBatch(self.window, self.window, self.window, 1, 0, *documents))  # its labels are not read
        run_schedule(self.schedule, self.programs, self.session.pipeline.communicator)
        if self.session.plan.sizes.pp > 1:
            dist.broadcast(self.next_token, self.last_rank, group=self.session.groups["pp"])
        return int(self.next_token)

    def _closed(self, mb: int, outputs: Message, *, adds: bool) -> Message:
        logits, group = self._at_position(outputs[0][0]), self.session.groups.get("tp")
        if group is not None:
            logits = gather_runs(logits, 0, self.session.config.model.vocab_size, group)
        # A small model that always takes the likeliest token soon repeats one word.
        self.next_token[0] = drawn(logits, self.dice, temperature=0.8, top_k=40)
        return outputs

    def _at_position(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [n] of the last token, from logits [s, n]. A collective of the ranks that share the sequence."""
        place = self.session.model.parts.cp
        if place.size == 1:
            return logits[self.position]
        positions = own_positions(Halves(place.rank, place.size, self.window.shape[-1]), logits.device)
        own = logits[(positions == self.position).int().argmax()]  # any row, if another rank has the position
        own = own * (positions == self.position).any()
        dist.all_reduce(own, group=self.session.groups["cp"])
        return own


SAMPLE_LENGTH = 200
SHORT_SAMPLE_LENGTH = 32
"""Tokens drawn from a large model, so that a finished run frees its devices soon, and from miniatures."""
SAMPLE_FLOPS = 1e12
"""The most operations of a long sample: seconds on a CPU. Every token computes the whole window again."""
_PROMPT_LENGTH = 64
_NEWLINE = ord("\n")


def write_samples(session: Session) -> list[dict[str, str]]:
    """`{prompt, text}` of the model's continuation of each of `log.prompts`, else of a line from the middle of the
    corpus or a turn of a conversation; none if the tokens have no text. A collective of all ranks, which share experts
    and split weights: every pipeline makes the same samples."""
    tokenizer = load_tokenizer(session.config.data.tokenizer)
    end = tokenizer.eos if session.config.data.format == CHAT else None
    window = sum(spec.flops_forward for spec in session.plan.stages)
    small = session.config.scale is None and SAMPLE_LENGTH * window <= SAMPLE_FLOPS
    count = SAMPLE_LENGTH if small else SHORT_SAMPLE_LENGTH
    samples = [
        {"prompt": text, "text": tokenizer.decode(Generator(session).continue_prompt(tokens, count, end))}
        for text, tokens in prompts_of(session.config, tokenizer) or _prompts_of_data(session, tokenizer)
    ]
    if session.replica.gathered is not None:
        session.replica.gathered.release_all()
    return samples


def _prompts_of_data(session: Session, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompt that rank 0 of each pipeline takes from the data; none if it has a token that the config's tokenizer
    lacks. A collective of each pipeline."""
    found = torch.zeros(1 + max(_PROMPT_LENGTH, session.config.data.seq_length), dtype=torch.int64, device="cpu")
    if session.data.training is not None:
        corpus, start = session.data.training.corpora[0], [tokenizer.eos or 0] * _PROMPT_LENGTH
        if isinstance(corpus, ConversationRows):
            start = corpus.opening().tolist()
        else:
            line_end = _NEWLINE if isinstance(tokenizer, ByteTokenizer) else None
            start = (start + prompt_from(corpus.tokens, line_end).tolist())[-_PROMPT_LENGTH:]
        found[: 1 + len(start)] = torch.tensor([len(start), *start], device="cpu")
    if session.plan.sizes.pp > 1:
        dist.broadcast(found, dist.get_global_rank(session.groups["pp"], 0), group=session.groups["pp"])
    count, *tokens = found.tolist()
    tokens = tokens[:count]
    return [Prompt(tokenizer.decode(tokens), tokens)] if max(tokens) < tokenizer.vocab_size else []


def prompt_from(tokens: Tokens, newline: int | None = _NEWLINE) -> Tokens:
    """Tokens from the middle of `tokens`, after a `newline` if one is near; fewer if there is less text. The first
    characters of a corpus are a poor prompt: a licence, a heading, an import."""
    middle = max(0, min(len(tokens) // 2, len(tokens) - 2 * _PROMPT_LENGTH))
    nearby = tokens[middle : middle + _PROMPT_LENGTH].tolist()
    begin = middle + (nearby.index(newline) + 1 if newline in nearby else 0)
    return tokens[begin : begin + _PROMPT_LENGTH]
