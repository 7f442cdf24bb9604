"""`PipelineParallelLayerLayout`: which layers live on which stage, read from a string or from lists.

Stages are in model order; stage s is chunk s // pp of pp_rank s % pp, as in Megatron (a schedule may place them as a V:
`action.Placement`). An object never changes and reads no global state: `pp_rank=None` means the rank that the object
was bound to when it was made. `reader` reads both forms, `rules` judges, `letters` writes.
"""

from __future__ import annotations

import copy
from itertools import accumulate, groupby
from typing import Any

from ppctl.errors import LayoutError, Problem
from ppctl.layout.letters import LETTERS, MAX_ITEMS, TYPES, LayerType, LayoutSource, canonical_text
from ppctl.layout.reader import read_layout
from ppctl.layout.rules import Rules, even_counts, find_problems, stages_of

__all__ = ["LayerType", "PipelineParallelLayerLayout", "even_layout"]


class PipelineParallelLayerLayout:
    """Which layers live on which stage of a pipeline.

    `layout` is a string (`Et*3|(tt|)*29,m|L`) or a list with one list per stage, of `LayerType` members, their names or
    the letters. `pp_rank` binds the object to a rank, the default of the `get_*` methods; `key` is the config key that
    the user typed, for messages; `num_layers` and `mtp_num_layers` (None: not known) make suggestions fit the model.
    Raises LayoutError with all mistakes of a layout that cannot be read, else with every problem of the layout if its
    number of stages is no multiple of the pipeline's size; also for sizes and ranks out of range.

    Attributes: `pipeline_model_parallel_size`, `virtual_pipeline_model_parallel_size` (chunks per rank), `pp_rank`.
    """

    def __init__(
        self,
        layout: str | list[Any],
        pipeline_model_parallel_size: int,
        *,
        pp_rank: int | None = None,
        key: str = "layout",
        num_layers: int | None = None,
        mtp_num_layers: int | None = None,
    ) -> None:
        self.pipeline_model_parallel_size = pp = _checked_pp(pipeline_model_parallel_size, LayoutSource(key))
        self._input = copy.deepcopy(layout)
        self._letters, self._source = read_layout(layout, key, pp, num_layers, mtp_num_layers)
        if len(self._letters) % pp:
            raise LayoutError(find_problems(Rules(self._letters, pp, num_layers, mtp_num_layers, self._source)))
        self.virtual_pipeline_model_parallel_size = len(self._letters) // pp
        self._offsets = {
            letter: tuple(accumulate((stage.count(letter) for stage in self._letters), initial=0)) for letter in TYPES
        }
        self.pp_rank = None if pp_rank is None else self._in_range(pp_rank, pp, "pp_rank")

    def __repr__(self) -> str:
        """The layout as it was given."""
        return self._input if isinstance(self._input, str) else repr(self._input)

    @property
    def stages(self) -> tuple[tuple[LayerType, ...], ...]:
        """The layers of every stage, in model order."""
        return tuple(tuple(TYPES[letter] for letter in stage) for stage in self._letters)

    @property
    def layout(self) -> list[list[list[LayerType]]]:
        """The layers by `[pp_rank][chunk]`: a fresh copy."""
        stages, pp = self.stages, self.pipeline_model_parallel_size
        return [[list(stage) for stage in stages[rank::pp]] for rank in range(pp)]

    @property
    def flatten_layout(self) -> list[LayerType]:
        """All layers in model order: a fresh copy."""
        return [layer for stage in self.stages for layer in stage]

    def canonical(self) -> str:
        """A short string that parses to the same stages, in Megatron too. Raises LayoutError for encoder layers."""
        if any("e" in stage for stage in self._letters):
            raise LayoutError(
                Problem("PP-E019", "encoder layers have no letter in a layout string", place=self._source.key)
            )
        return canonical_text(self._letters)

    def layer_names(self, stage: int) -> tuple[str, ...]:
        """The layers of one stage by name: `embedding`, `decoder.0`, `mtp.0`, `loss`; ids count through the model."""
        self._in_range(stage, len(self._letters), "stage")
        names: list[str] = []
        for letter, run in groupby(self._letters[stage]):
            name = TYPES[letter].value
            numbered = TYPES[letter] not in (LayerType.embedding, LayerType.loss)
            first = self._offsets[letter][stage] + sum(each.startswith(name) for each in names)
            names += [f"{name}.{first + i}" if numbered else name for i, _ in enumerate(run)]
        return tuple(names)

    def problems(self, num_layers: int, mtp_num_layers: int | None) -> list[Problem]:
        """Every rule that the layout breaks for a model of these sizes; each remedy, pasted, is a sound layout."""
        rules = Rules(self._letters, self.pipeline_model_parallel_size, num_layers, mtp_num_layers or 0, self._source)
        return find_problems(rules)

    def validate_layer_layout(self, num_layers: int, mtp_num_layers: int | None) -> bool:
        """Check whether the layout is valid. Raises LayoutError with all problems. Returns `mtp_standalone`: whether a
        rank other than the last pp_rank holds the MTP layers."""
        if problems := self.problems(num_layers, mtp_num_layers):
            raise LayoutError(problems)
        return any("m" in stage for stage in self._letters[-self.pipeline_model_parallel_size : -1])

    def get_num_layers_to_build(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """How many layers of a kind this stage holds. Raises LayoutError if its rank or chunk is missing or wrong."""
        offsets = self._offsets[LETTERS[LayerType(layer_type)]]
        stage = self._stage(vp_stage, pp_rank)
        return offsets[stage + 1] - offsets[stage]

    def get_layer_offset(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> int:
        """The 0-based id of this stage's first layer of a kind: how many earlier stages hold. Raises LayoutError."""
        return self._offsets[LETTERS[LayerType(layer_type)]][self._stage(vp_stage, pp_rank)]

    def get_layer_id_list(
        self, layer_type: LayerType = LayerType.decoder, vp_stage: int | None = None, pp_rank: int | None = None
    ) -> list[int]:
        """The global 0-based ids of this stage's layers of a kind. Raises LayoutError."""
        offset = self.get_layer_offset(layer_type, vp_stage, pp_rank)
        return list(range(offset, offset + self.get_num_layers_to_build(layer_type, vp_stage, pp_rank)))

    def pretty_repr(self) -> str:
        """A table of the layers held by each stage: a row per pp_rank (equal neighbours merged), a column per chunk."""
        pp, vpp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        rows: list[list[str]] = [["", *(f"VPP rank {chunk}" for chunk in range(vpp))]] if vpp > 1 else []
        by_rank = [[_cell(stage) for stage in self._letters[rank::pp]] for rank in range(pp)]
        first = 0
        for cells, run in groupby(by_rank):
            last = first + len(list(run)) - 1
            rows.append([f"PP rank {first}" if first == last else f"PP rank {first}-{last}", *cells])
            first = last + 1
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        gap = " " * (8 if vpp <= 4 else 4)
        return "\n".join(gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)

    @staticmethod
    def from_str(layout: str, pipeline_model_parallel_size: int) -> PipelineParallelLayerLayout:
        """Parse a layout string. Raises LayoutError as the constructor does."""
        return PipelineParallelLayerLayout(layout, pipeline_model_parallel_size)

    @staticmethod
    def get_num_stages_from_str(layout: str) -> int:
        """The number of pp x vpp stages of a layout string. Raises LayoutError with all its mistakes."""
        return len(read_layout(layout, "layout")[0])

    @staticmethod
    def parse_str_to_list(layout_str: str) -> list[list[LayerType]]:
        """Parse a layout string to one list of layers per stage. Raises LayoutError with all its mistakes."""
        return [[TYPES[letter] for letter in stage] for stage in read_layout(layout_str, "layout")[0]]

    def _stage(self, vp_stage: int | None, pp_rank: int | None) -> int:
        pp, vpp = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        rank = self.pp_rank if pp_rank is None else pp_rank
        if rank is None:
            message = "pp_rank is not given, and this layout was not bound to a rank"
            raise LayoutError(Problem("PP-E020", message, f"pass pp_rank=0 (to {pp - 1}) here or to the constructor"))
        if vp_stage is None and vpp > 1:
            message = f"vp_stage is not given, but every rank holds {vpp} chunks"
            raise LayoutError(Problem("PP-E020", message, f"pass vp_stage=0 (to {vpp - 1})"))
        return self._in_range(vp_stage or 0, vpp, "vp_stage") * pp + self._in_range(rank, pp, "pp_rank")

    @staticmethod
    def _in_range(value: int, size: int, name: str) -> int:
        if not isinstance(value, int) or not 0 <= value < size:
            raise LayoutError(Problem("PP-E020", f"{name}={value!r} is outside of 0 to {size - 1}"))
        return value


def even_layout(num_layers: int, num_stages: int, mtp_num_layers: int = 0) -> str:
    """The layout that is used when none is given: the canonical string of an even split into `num_stages` = pp x vpp.

    The embedding is in the first stage; the loss and all MTP layers are in the last. Every stage holds equally many
    layers, as in Megatron; if they do not divide, the first `num_layers % num_stages` stages hold one more. Raises
    LayoutError for impossible sizes."""
    sizes = {"num_layers": (num_layers, 0), "num_stages": (num_stages, 1), "mtp_num_layers": (mtp_num_layers, 0)}
    problems = [
        Problem("PP-E021", f"{name}={value} cannot be split: it must be at least {least}")
        for name, (value, least) in sizes.items()
        if value < least
    ]
    total = num_layers + num_stages + mtp_num_layers + 1
    if not problems and total > MAX_ITEMS:
        message = f"{num_layers:,} layers in {num_stages:,} stages are more than a layout holds ({MAX_ITEMS:,} items)"
        problems.append(Problem("PP-E021", message))
    if problems:
        raise LayoutError(problems)
    return canonical_text(stages_of(even_counts(num_layers, num_stages), mtp_num_layers, num_stages - 1))


def _cell(stage: str) -> str:
    runs = [(TYPES[letter].value, len(list(run))) for letter, run in groupby(stage)]
    return ",".join(name if count == 1 else f"{name}*{count}" for name, count in runs) or "(empty stage)"


def _checked_pp(pp: Any, source: LayoutSource) -> int:
    if isinstance(pp, int) and pp >= 1:
        return pp
    message = f"pipeline_model_parallel_size={pp!r} is not a number of ranks: it must be an integer of 1 or more"
    raise LayoutError(Problem("PP-E011", message, source.setting("pp", 1)))
