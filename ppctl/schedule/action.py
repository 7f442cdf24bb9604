"""Schedules as values: operations, actions, channels, and the value that holds them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, lru_cache, partial
from itertools import pairwise, repeat
from typing import NamedTuple

from ppctl.errors import Problem, ScheduleError


class Op(StrEnum):
    """The operation of one action. `B` computes both gradients; `I` and `W` are its halves (input, weights)."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's spelling of the input-gradient half
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"


F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, REDUCE_GRAD = Op  # noqa: E741
"""The operations as names, for code that runs once per action: in Python 3.11 `Op.F` is a call."""

COMPUTE = frozenset({F, B, I, W})
BACKWARDS = frozenset({B, I, W})
INPUT_GRADIENTS = frozenset({B, I})
"""Operations that make the gradient of a stage's input, from the gradient of its output."""
WEIGHT_GRADIENTS = frozenset({B, W})
"""Operations that add a microbatch's part to the gradients of a stage's weights."""
LIFE_ENDS = WEIGHT_GRADIENTS
"""Operations that end the life of a microbatch on a stage: then nothing of its forward is needed."""
PASSED_ON = INPUT_GRADIENTS | {F}
"""Operations that work on a neighbouring stage's result, and make the result that the next stage works on."""
FORWARDS = frozenset({F, SEND_F, RECV_F})
"""A forward, the message with its input, and the message with its result."""
SENDS = frozenset({SEND_F, SEND_B})
RECEIVES = frozenset({RECV_F, RECV_B})
MESSAGES = SENDS | RECEIVES
TIMED = frozenset(Op) - MESSAGES
"""Operations that take a rank's time; messages take a channel's time."""

BOTH = "FB"
"""The direction of a queue that carries activations and gradients."""

_ACTION = re.compile(r"([0-9]{1,18})(REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]{0,18})", re.ASCII)
_SHARDS = re.compile(r"[0-9]+(?:UNSHARD|RESHARD)[0-9]*", re.ASCII)
"""Cells of torch's schedules that gather and free FSDP's parameters, which are no part of a schedule here."""
_FEW = 20
"""A file's placement is recognised even if one action in this many is in a wrong row."""

_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")
_CHANNEL = re.compile(r"([0-9]+)->([0-9]+) ([FB])", re.ASCII)


def _groups(pattern: re.Pattern[str], text: str, what: str) -> tuple[str, ...]:
    """The groups of a text that matches. Raises ScheduleError (PP-E301) for a text that is not `what`."""
    match = pattern.fullmatch(text)
    if match is None:
        raise ScheduleError(Problem("PP-E301", f"{text!r} is not {what}"))
    return match.groups()


class Action(NamedTuple):
    """One entry of a rank's list: `Action(Op.F, 3, 12)` prints as `3F12`, forward of microbatch 12 on stage 3. `RECV_F`
    of stage s receives that stage's input activation, `SEND_F` sends its output; `RECV_B` receives the gradient of its
    output and `SEND_B` sends the gradient of its input. `REDUCE_GRAD` concerns a whole stage: its `mb` is -1."""

    op: Op
    stage: int
    mb: int = -1

    def __str__(self) -> str:
        return f"{self.stage}{self.op}" if self.op is Op.REDUCE_GRAD else f"{self.stage}{self.op}{self.mb}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse torch's spelling, in which a missing microbatch means 0. Raises ScheduleError for other text."""
        what = f"an action: a stage, an operation ({', '.join(Op)}) and a microbatch, as in 3F12"
        stage, op, mb = _groups(_ACTION, text.strip(), what)
        return cls(Op(op), int(stage), -1 if op == Op.REDUCE_GRAD else int(mb or 0))


class Pair(NamedTuple):
    """A forward and a backward that stand side by side in a rank's list: `(2F1;1B0)OVERLAP_F_B` in torch's spelling."""

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Parse the text of `str(pair)`, which may have more blanks. Raises ScheduleError for any other text."""
        words = _groups(_OVERLAP, text.strip(), "a pair of actions, as in (2F1;1B0)OVERLAP_F_B")
        return cls(*map(Action.parse, words))


new_action = partial(tuple.__new__, Action)
"""An action from a tuple, at C speed."""


@lru_cache(2048)
def lane(op: Op, stage: int, num_microbatches: int) -> tuple[Action, ...]:
    """One operation of one stage for every microbatch in order; cached, because many passes ask for it."""
    return tuple(map(new_action, zip(repeat(op), repeat(stage), range(num_microbatches), strict=False)))


class Channel(NamedTuple):
    """A one-way connection between two pp_ranks that keeps order; `direction` is "F" (activations), "B" (gradients)."""

    source: int
    target: int
    direction: str

    def __str__(self) -> str:
        return f"{self.source}->{self.target} {self.direction}"

    @classmethod
    def parse(cls, text: str) -> Channel:
        """Parse the text of `str`. Raises ScheduleError for any other text."""
        source, target, way = _groups(_CHANNEL, text, "a channel: two pp_ranks and a direction, as in 0->1 F")
        return cls(int(source), int(target), way)


class Edge(NamedTuple):
    """The path of a stage's results, activations or gradients, to a neighbouring stage on another rank."""

    channel: Channel
    send: Op
    sender: int
    receive: Op
    receiver: int

    @property
    def ops(self) -> frozenset[Op]:
        """The operations that make the results, and the receiver's operations that use them."""
        return PASSED_ON - INPUT_GRADIENTS if self.send is SEND_F else INPUT_GRADIENTS


@dataclass(frozen=True, slots=True)
class Placement:
    """Which pp_rank owns a stage. Loop: stage s is on s % pp. V: down the ranks and back up (two chunks per rank)."""

    kind: str
    """`loop` or `v`."""
    pp: int
    num_stages: int

    def rank_of(self, stage: int) -> int:
        """The pp_rank that owns `stage`."""
        lap, position = divmod(stage, self.pp)
        return self.pp - 1 - position if self.kind == "v" and lap % 2 else position

    def chunk_of(self, stage: int) -> int:
        """The index of `stage` among its rank's own stages (Megatron's vpp_rank)."""
        return stage // self.pp

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of one rank, in chunk order."""
        return tuple(s for s in range(self.num_stages) if self.rank_of(s) == pp_rank)

    def is_local(self, stage: int) -> bool:
        """Whether the edge from `stage` to `stage + 1` stays on one rank (pp = 1, or a V's turning point)."""
        return self.rank_of(stage) == self.rank_of(stage + 1)

    def channel(self, action: Action) -> Channel:
        """The channel of a message action. Raises ValueError for other actions."""
        op, stage, _ = action
        if op not in MESSAGES:
            raise ValueError(f"{action} sends and receives nothing")
        direction, step = ("F", 1) if op in FORWARDS else ("B", -1)
        source, target = (stage, stage + step) if op in SENDS else (stage - step, stage)
        return Channel(self.rank_of(source), self.rank_of(target), direction)


@dataclass(frozen=True)
class Schedule:
    """One training step as data: for every pp_rank the tuple of its actions. No time, no idle slots, no tensors.

    `capacities` is empty until the schedule is lowered; then it holds, per channel, how many messages may be under way:
    posted receives plus outstanding sends (see `receive_slots` and `send_slots`).

    In a `batched` schedule the neighbouring messages of a rank's list form a batch: all are started together, then all
    are waited for. Between two ranks they are matched in order, activations and gradients alike. No message is under
    way while the rank computes.

    The first `frozen_stages` stages train nothing: they have only forwards, and receive no gradients.

    `pairs` are forwards and backwards that a rank may overlap. In its list the forward comes first, with nothing but
    messages between the two, so that the list alone runs them one after the other (`pairs.wrong_pairs` checks them).
    """

    name: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    capacities: Mapping[Channel, int] = field(default_factory=dict, hash=False)
    batched: bool = False
    pairs: frozenset[Pair] = frozenset()
    frozen_stages: int = 0

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) pairs whose backward is split into I and W."""
        return frozenset({(stage, mb) for row in self.actions for op, stage, mb in row if op is I})

    @cached_property
    def lowered(self) -> bool:
        """Whether the messages are in the lists (every schedule with one rank counts as lowered)."""
        return len(self.actions) == 1 or any(op in MESSAGES for row in self.actions for op, _, _ in row)

    @cached_property
    def messages_into(self) -> tuple[bool, ...]:
        """Per stage, whether the messages into it are actions of the lists; over local edges they never are."""
        stages = range(1, self.placement.num_stages)
        return (False, *(self.lowered and not self.placement.is_local(s - 1) for s in stages))

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The edges between ranks, even if no list has messages: forward ones, then those with gradients to send."""
        ranks = map(self.placement.rank_of, range(self.placement.num_stages))
        pairs = [(a, b, stage) for stage, (a, b) in enumerate(pairwise(ranks)) if a != b]
        ahead = [Edge(Channel(a, b, "F"), SEND_F, stage, RECV_F, stage + 1) for a, b, stage in pairs]
        back = [Edge(Channel(b, a, "B"), SEND_B, stage + 1, RECV_B, stage) for a, b, stage in pairs]
        return (*ahead, *(edge for edge in back if self.gradient_leaves(edge.sender)))

    def gradient_leaves(self, stage: int) -> bool:
        """Whether the gradient of a stage's input is made and sent to the previous stage."""
        return stage > self.frozen_stages

    def queue(self, channel: Channel) -> Channel:
        """The queue that keeps a channel's messages in order: the channel itself, or one for both directions."""
        return Channel(channel.source, channel.target, BOTH) if self.batched else channel

    def batch_ends(self, pp_rank: int) -> frozenset[int]:
        """The indexes in a rank's list at which a batch is complete: the last of each run of messages."""
        row = self.actions[pp_rank]
        messages = [action.op in MESSAGES for action in row]
        return frozenset(i for i, (here, after) in enumerate(pairwise([*messages, False])) if here and not after)

    def to_csv(self) -> str:
        """One line per pp_rank, cells in torch's spelling. Capacities and batching are not part of it. A pair is one
        cell, unless messages are between its two actions."""
        rows = (grouped(row, self.pairs) if self.pairs else row for row in self.actions)
        return "".join(",".join(map(str, row)) + "\n" for row in rows)

    @classmethod
    def from_csv(
        cls, text: str, *, name: str = "csv", placement: Placement | None = None, num_microbatches: int | None = None
    ) -> Schedule:
        """Read one line per pp_rank, in torch's spelling; empty cells, UNSHARD and RESHARD are ignored.

        A cell with an overlapped forward and backward, `(2F1;1B0)OVERLAP_F_B`, becomes two actions and one of `pairs`.
        Without `placement` the rows determine which rank owns which stage (loop or V); without `num_microbatches` the
        largest microbatch does. Raises ScheduleError with every bad cell, or for misplaced stages. Verifies nothing.
        """
        rows, pairs, problems = _read_cells(text)
        if problems:
            raise ScheduleError(problems)
        while rows and not rows[-1] and (placement is None or len(rows) > placement.pp):
            rows.pop()
        if placement is None:
            placement = _placement_of(rows)
        elif len(rows) != placement.pp:
            raise ScheduleError(Problem("PP-E303", f"{len(rows)} rows, but pp is {placement.pp}: write one for each"))
        count = num_microbatches or 1 + max((action.mb for row in rows for action in row), default=0)
        return cls(name, placement, count, tuple(map(tuple, rows)), pairs=pairs)


def grouped(row: Sequence[Action], pairs: Collection[Pair]) -> list[Action | Pair]:
    """A rank's list with a pair in place of its two actions where these are adjacent."""
    units: list[Action | Pair] = []
    for action in row:
        before = units[-1] if units and pairs else None
        if isinstance(before, Action) and (before, action) in pairs:
            units[-1] = Pair(before, action)
        else:
            units.append(action)
    return units


def _read_cells(text: str) -> tuple[list[list[Action]], frozenset[Pair], list[Problem]]:
    """(the actions of every line, the pairs among them, a problem for every cell that is neither)."""
    rows: list[list[Action]] = []
    pairs: list[Pair] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        row: list[Action] = []
        for column, cell in enumerate(line.split(","), 1):
            try:
                spelling = cell.strip()
                if spelling.startswith("("):
                    pairs.append(Pair.parse(spelling))
                    row += pairs[-1]
                elif spelling and not _SHARDS.fullmatch(spelling):
                    row.append(Action.parse(spelling))
            except ScheduleError as error:
                place = f"row {number} (pp_rank {number - 1}), column {column}"
                problems.append(Problem("PP-E302", f"{place}: {error.problems[0].message}", place=place))
        rows.append(row)
    return rows, frozenset(pairs), problems


def _placement_of(rows: list[list[Action]]) -> Placement:
    """The placement under which every row has only its own stages, except for a few actions, which `verify` names.
    Raises ScheduleError."""
    owners = {action.stage: pp_rank for pp_rank, row in enumerate(rows) for action in row}
    if not owners:
        nothing = "the schedule has no actions"
        raise ScheduleError(Problem("PP-E303", nothing, "write one row per pp_rank, as in 0F0,0B0"))
    for kind in ("loop", "v"):
        placement = Placement(kind, len(rows), max(owners) + 1)
        astray = sum(placement.rank_of(action.stage) != r for r, row in enumerate(rows) for action in row)
        if astray * _FEW <= sum(map(len, rows)):
            return placement
    where = ", ".join(f"{stage} in row {pp_rank + 1}" for stage, pp_rank in sorted(owners.items()))
    message = f"the stages are placed neither as a loop (s % pp) nor as a V over {len(rows)} rows: {where}"
    raise ScheduleError(Problem("PP-E303", message))


def receive_slots(capacity: int) -> int:
    """How many receives a channel of this capacity keeps posted ahead of use."""
    return (capacity + 1) // 2


def send_slots(capacity: int) -> int:
    """How many sends a channel of this capacity may leave outstanding; 0 means that a send waits for its receive."""
    return capacity // 2


def deps(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must have ended before `action` may start: the only dependency rule. In a lowered schedule
    messages connect stages on different ranks; otherwise, and on edges within a rank, the dependency is the
    neighbouring stage's computation."""
    op, stage, mb = action
    if op is F:
        if stage == 0:
            return ()
        return (Action(RECV_F, stage, mb) if schedule.messages_into[stage] else Action(F, stage - 1, mb),)
    if op in INPUT_GRADIENTS:
        own = Action(F, stage, mb)
        if stage == schedule.placement.num_stages - 1:
            return (own,)
        remote = schedule.messages_into[stage + 1]
        return (own, Action(RECV_B, stage, mb) if remote else input_gradient_of(stage + 1, mb, schedule))
    if op is W:
        return (Action(I, stage, mb),)
    if op is SEND_F:
        return (Action(F, stage, mb),)
    if op is SEND_B:
        return (input_gradient_of(stage, mb, schedule),)
    if op is RECV_F:
        return (Action(SEND_F, stage - 1, mb),)
    if op is RECV_B:
        return (Action(SEND_B, stage + 1, mb),)
    return tuple(Action(W if (stage, m) in schedule.split else B, stage, m) for m in range(schedule.num_microbatches))


def stages_with_backwards(actions: Iterable[Action]) -> frozenset[int]:
    """The stages of a list that have backwards, so that microbatches live on after their forwards."""
    return frozenset({stage for op, stage, _ in actions if op in LIFE_ENDS})


def input_gradient_of(stage: int, mb: int, schedule: Schedule) -> Action:
    """The action that makes the gradient of a stage's input: B, or I if the backward is split."""
    return Action(I if (stage, mb) in schedule.split else B, stage, mb)
