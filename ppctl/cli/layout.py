"""`ppctl layout LAYOUT --pp N`: check and draw a layout; `--suggest` finds the fastest one for a config, with Hydra."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from ppctl.cli.console import in_blocks, width
from ppctl.cli.pipeline_drawing import Chunk, rows_of, with_header
from ppctl.errors import ConfigError, LayoutError, Problem, pasted
from ppctl.layout import LayerType, PipelineParallelLayerLayout
from ppctl.layout.letters import LETTERS

INTERMIXED = True
"""Overrides may stand before and after options."""

_KEY = "LAYOUT"
"""The layout's name in the usage line and in messages."""
_LETTERS = (
    "E embedding, t transformer layer, m multi-token prediction, L loss; a row is a pipeline rank, a column a chunk"
)
_PIPE_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("layout", nargs="*", metavar=_KEY, help="such as 'Et*3|(tt|)*29,m|L', quoted for the shell")
    parser.add_argument("--pp", type=int, metavar="N", help="number of pipeline ranks")
    parser.add_argument(
        "--num-layers", type=int, metavar="N", help="number of decoder layers (default: those of LAYOUT)"
    )
    parser.add_argument(
        "--mtp-num-layers", type=int, metavar="M", help="number of MTP layers (default: those of LAYOUT)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    words = "instead of checking LAYOUT, find the fastest one for a config: +recipe=NAME [KEY=VALUE ...]"
    parser.add_argument("--suggest", action="store_true", help=words)


def run(args: argparse.Namespace) -> int:
    """Draw the layout. Exit code 0, or 2 with all problems on stderr."""
    if args.suggest:
        return _suggest(args)
    if len(args.layout) != 1 or args.pp is None:
        message = "one layout and --pp are needed, or --suggest"
        words = args.typed if len(args.layout) == 1 else ("layout", "Et*4|t*4L")
        raise ConfigError(Problem("PP-E105", message, pasted("ppctl", *words, "--pp", "2"), "command line"))
    try:
        layout = PipelineParallelLayerLayout(
            args.layout[0], args.pp, key=_KEY, num_layers=args.num_layers, mtp_num_layers=args.mtp_num_layers
        )
    except LayoutError as error:
        return _report(error.problems, _described(None, args.pp, error.problems) if args.json else "")
    kinds = layout.flatten_layout
    decoders = kinds.count(LayerType.decoder) if args.num_layers is None else args.num_layers
    mtp = kinds.count(LayerType.mtp) if args.mtp_num_layers is None else args.mtp_num_layers
    problems = layout.problems(decoders, mtp)
    result = _described(layout, args.pp, problems) if args.json else drawing(layout, width(_PIPE_WIDTH))
    return _report(problems, result)


def _suggest(args: argparse.Namespace) -> int:
    """Print the layout that `layout=auto` chooses; returns the exit code."""
    from ppctl.config.argv import normalise
    from ppctl.launch.planning import planned  # slow imports, which drawing a layout does not need

    sizes = {"pp": args.pp, "model.num_layers": args.num_layers, "model.mtp_num_layers": args.mtp_num_layers}
    typed = [f"{key}={value}" for key, value in sizes.items() if value is not None]
    line = normalise([*args.layout, *typed, "layout=auto"], {}, "layout")
    _, plan, problems = planned(line)
    if line.problems or line.rest:
        raise ConfigError(problems)
    if plan is None:
        return _report(problems, "")
    layout = PipelineParallelLayerLayout(plan.layout, plan.sizes.pp, key=_KEY)
    if args.json:
        return _report(problems, _described(layout, plan.sizes.pp, problems))
    equation = next(derived.equation for derived in plan.derived if derived.key == "layout")
    compared = equation.partition(": ")[2].split("; ")
    step = f"simulated step {equation.partition(plan.layout)[2].partition(' a step')[0].strip()}"
    return _report(problems, "\n".join([drawing(layout, width(_PIPE_WIDTH)), "", step, *compared]))


def _report(problems: Sequence[Problem], result: str) -> int:
    """Print the result on stdout and the problems on stderr; returns the exit code."""
    if result:
        print(result)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 2 if problems else 0


def _described(layout: PipelineParallelLayerLayout | None, pp: int, problems: Sequence[Problem]) -> str:
    described: dict[str, Any] = {
        "layout": layout.canonical() if layout else None,
        "pp": pp,
        "vpp": layout.virtual_pipeline_model_parallel_size if layout else None,
        "stages": [
            {"stage": stage, "pp_rank": stage % pp, "vpp_rank": stage // pp, "layers": layout.layer_names(stage)}
            for stage in range(len(layout.stages))
        ]
        if layout
        else [],
        "problems": [problem.to_json() for problem in problems],
    }
    return json.dumps(described, indent=2)


def drawing(layout: PipelineParallelLayerLayout, columns: int) -> str:
    """The layout as a table, cut into blocks of columns that are no wider than `columns` if possible."""
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    kinds = layout.flatten_layout
    counts = [(kinds.count(LayerType.decoder), "layer"), (kinds.count(LayerType.mtp), "MTP layer")]
    sizes = [f"{count} {name}{'' if count == 1 else 's'}" for count, name in counts if count or name == "layer"]
    stages = f"{len(layout.stages)} stage{'' if pp * vpp == 1 else 's'}"
    letters = textwrap.fill(_LETTERS, max(columns, 40), subsequent_indent="  ")
    head = [layout.canonical(), f"{stages} = pp {pp} x vpp {vpp}; {', '.join(sizes)}", letters]
    return "\n".join([*head, "", in_blocks(with_header(rows_of(_chunks(layout))), columns)])


def _chunks(layout: PipelineParallelLayerLayout) -> Iterator[Chunk]:
    for at, stage in enumerate(layout.stages):
        vpp_rank, pp_rank = divmod(at, layout.pipeline_model_parallel_size)
        first = layout.get_layer_offset(LayerType.decoder, vpp_rank, pp_rank)
        yield Chunk(pp_rank, "".join(LETTERS[kind] for kind in stage), first)
