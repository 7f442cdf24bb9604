"""Rules that make a layout sound for a pipeline and a model, and the nearest sound layout.

Works on stages as strings of letters (`e` stands for an encoder layer, which has no letter in the grammar). The rules
are those of Megatron-core's `validate_layer_layout`, all reported at once, with two more: E is in the first stage and L
in the last. Stage s is on pp_rank s % pp, chunk s // pp, as in Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ppctl.errors import Problem
from ppctl.layout.letters import MAX_ITEMS, LayoutSource, canonical_text


class Rules(NamedTuple):
    """What the rules judge: stages, pipeline, the model's layers (None: not known), and where the layout is written."""

    stages: tuple[str, ...]
    pp: int
    num_layers: int | None
    mtp_num_layers: int | None
    source: LayoutSource

    def find(self, letter: str) -> Iterator[tuple[int, int]]:
        """(stage, index in the stage) of every layer of one kind, in model order."""
        for stage, letters in enumerate(self.stages):
            if letter in letters:
                yield from ((stage, index) for index, each in enumerate(letters) if each == letter)


def find_problems(rules: Rules) -> list[Problem]:
    """A problem for every rule that the layout breaks. Each remedy begins with the layout that mends them all; there is
    none if it would be too large."""
    mended = mend(rules.stages, rules.pp, rules.num_layers, rules.mtp_num_layers)
    remedy = rules.source.override(canonical_text(mended)) if mended else ""
    return [
        Problem(each.code, each.message, "\n".join(filter(None, (remedy, each.remedy))), each.place)
        for check in _CHECKS
        for each in check(rules)
    ]


def _stage_count(rules: Rules) -> Iterator[Problem]:
    count = len(rules.stages)
    if count % rules.pp:
        message = f"the layout has {count} stage{'' if count == 1 else 's'}, which is not a multiple of pp={rules.pp}"
        divisors = [size for size in range(1, count + 1) if count % size == 0]
        nearest = max(divisors, key=lambda size: (-abs(size - rules.pp), size))
        yield Problem("PP-E012", message, rules.source.setting("pp", nearest), rules.source.place(count - 1))


def _embedding(rules: Rules) -> Iterator[Problem]:
    embeddings = list(rules.find("E"))
    if not embeddings:
        yield Problem("PP-E013", "the layout has no embedding: it begins with E", place=rules.source.place(0, 0))
    elif embeddings[0] != (0, 0):
        message = f"the embedding (E) must be the first layer of stage 0; here it is in stage {embeddings[0][0]}"
        if embeddings[0][0] == 0:
            message = "the embedding (E) must be the first layer of stage 0; here other layers come before it"
        yield Problem("PP-E013", message, place=rules.source.place(*embeddings[0]))
    if len(embeddings) > 1:
        message = f"a layout has exactly one embedding (E), this one has {len(embeddings)}"
        yield Problem("PP-E013", message, place=rules.source.place(*embeddings[1]))


def _loss(rules: Rules) -> Iterator[Problem]:
    losses = list(rules.find("L"))
    last = len(rules.stages) - 1
    if not losses:
        yield Problem("PP-E014", "the layout has no loss: L must be its last layer", place=rules.source.place(last))
    elif losses[-1] != (last, len(rules.stages[last]) - 1):
        message = f"the loss (L) must be the last layer of the last stage, {last}; here it is in stage {losses[-1][0]}"
        if losses[-1][0] == last:
            message = f"the loss (L) must be the last layer of the last stage, {last}; here other layers follow it"
        yield Problem("PP-E014", message, place=rules.source.place(*losses[-1]))
    if len(losses) > 1:
        message = f"a layout has exactly one loss (L), this one has {len(losses)}"
        yield Problem("PP-E014", message, place=rules.source.place(*losses[1]))


def _number(code: str, letter: str, key: str, rules: Rules) -> Iterator[Problem]:
    """Yield a problem if the number of these layers is not the model's `key`; nothing if that is not known."""
    places, wanted = list(rules.find(letter)), getattr(rules, key)
    if wanted is not None and len(places) != wanted:
        message = f"the layout holds {_layers(len(places), letter)}, the model has {key}={wanted}"
        remedy = rules.source.setting(f"model.{key}", len(places))
        yield Problem(code, message, remedy, _count_place(rules, places, wanted))


def _mtp_after_decoders(rules: Rules) -> Iterator[Problem]:
    first = next(rules.find("m"), None)
    late = next((place for place in rules.find("t") if first and place > first), None)
    if late:
        message = f"every decoder layer (t) comes before the MTP layers (m); here stage {late[0]} has one after them"
        yield Problem("PP-E017", message, place=rules.source.place(*late))


def _mtp_stage(rules: Rules) -> Iterator[Problem]:
    stages = [stage for stage, letters in enumerate(rules.stages) if "m" in letters]
    first_of_last_chunk = len(rules.stages) - rules.pp
    early = [stage for stage in stages if stage < first_of_last_chunk]
    if early and len(rules.stages) % rules.pp == 0:
        last = len(rules.stages) - 1
        allowed = f"stage {last}" if rules.pp == 1 else f"stages {first_of_last_chunk} to {last}"
        message = f"MTP layers (m) belong in a rank's last chunk, {allowed} at pp={rules.pp}; stage {early[0]} has one"
        yield Problem("PP-E018", message, place=rules.source.place(early[0], rules.stages[early[0]].index("m")))
    if len(stages) > 1:
        message = f"all MTP layers (m) share one stage; here they are in {len(stages)} stages"
        yield Problem("PP-E018", message, place=rules.source.place(stages[1], rules.stages[stages[1]].index("m")))


def _encoders(rules: Rules) -> Iterator[Problem]:
    encoder = next(rules.find("e"), None)
    if encoder:
        yield Problem("PP-E019", "encoder layers cannot be placed by a layout", place=rules.source.place(*encoder))


_CHECKS: tuple[Callable[[Rules], Iterator[Problem]], ...] = (
    _stage_count,
    _embedding,
    _loss,
    partial(_number, "PP-E015", "t", "num_layers"),
    partial(_number, "PP-E016", "m", "mtp_num_layers"),
    _mtp_after_decoders,
    _mtp_stage,
    _encoders,
)


def _layers(count: int, letter: str) -> str:
    kind = {"t": "decoder layer", "m": "MTP layer"}[letter]
    return f"{count} {kind}{'' if count == 1 else 's'} ({letter})"


def _count_place(rules: Rules, places: Sequence[tuple[int, int]], wanted: int) -> str:
    """The place of the first surplus layer; if some are missing, of the last one, or of the layout's end for none."""
    if len(places) > wanted >= 0:
        return rules.source.place(*places[wanted])
    return rules.source.place(*places[-1]) if places else rules.source.place(len(rules.stages) - 1)


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be: the first `num_layers % num_stages` stages hold one more."""
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (stage < more) for stage in range(num_stages))


def stages_of(counts: Sequence[int], mtp_num_layers: int, mtp_stage: int) -> tuple[str, ...]:
    """Stages with these numbers of layers, E in the first, L in the last, all MTP layers in `mtp_stage`."""
    last = len(counts) - 1
    return tuple(
        "E" * (stage == 0) + "t" * count + "m" * (mtp_num_layers * (stage == mtp_stage)) + "L" * (stage == last)
        for stage, count in enumerate(counts)
    )


def mend(
    stages: tuple[str, ...], pp: int, num_layers: int | None = None, mtp_num_layers: int | None = None
) -> tuple[str, ...] | None:
    """The nearest stages that break no rule. If the model's number of layers is not given, the layout's own is kept.
    None if even the nearest stages would expand to more than a layout may hold."""
    layers = sum(stage.count("t") for stage in stages) if num_layers is None else max(0, num_layers)
    mtp = sum(stage.count("m") for stage in stages) if mtp_num_layers is None else max(0, mtp_num_layers)
    fitted = _fit(stages, pp)
    size = max(len(fitted), pp)
    if layers + mtp + size + 2 > MAX_ITEMS or (len(fitted) % pp and size + pp > MAX_ITEMS):
        return None
    if len(fitted) % pp:
        counts = even_counts(layers, max(1, (len(fitted) + pp // 2) // pp) * pp)
        return stages_of(counts, mtp, len(counts) - 1)
    counts = _adjust([stage.count("t") for stage in fitted], layers)
    return stages_of(counts, mtp, _mtp_home(fitted, counts, pp))


def _fit(stages: tuple[str, ...], pp: int) -> tuple[str, ...]:
    """The stages, without the empty ones at both ends if that makes their number a multiple of pp."""
    if len(stages) % pp == 0:
        return stages
    held = [stage for stage, letters in enumerate(stages) if letters]
    inner = stages[held[0] : held[-1] + 1] if held else ()
    return inner if inner and len(inner) % pp == 0 else stages


def _adjust(counts: list[int], num_layers: int) -> tuple[int, ...]:
    """Counts that sum up to `num_layers`. Changes `counts`: adds one layer at a time to the emptiest stage, or takes it
    from the fullest. If more layers differ than there are stages, returns an even split."""
    missing = num_layers - sum(counts)
    if abs(missing) > len(counts):
        return even_counts(num_layers, len(counts))
    for _ in range(abs(missing)):
        if missing > 0:
            counts[counts.index(min(counts))] += 1
        else:
            counts[counts.index(max(counts))] -= 1
    return tuple(counts)


def _mtp_home(stages: tuple[str, ...], counts: tuple[int, ...], pp: int) -> int:
    """The stage that holds the MTP layers now if that is allowed, else the last stage."""
    holding = [stage for stage, letters in enumerate(stages) if "m" in letters]
    last_decoder = max((stage for stage, count in enumerate(counts) if count), default=0)
    legal = len(holding) == 1 and holding[0] >= max(last_decoder, len(stages) - pp)
    return holding[0] if legal else len(stages) - 1
