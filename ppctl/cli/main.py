"""`ppctl COMMAND`: finds the command, parses its arguments, prints problems once, and returns the exit code.

Each command is a module of `ppctl/cli/` with `add_arguments(parser)` and `run(args) -> int`. Only the called command's
module is imported; it imports what it needs at its top. Nothing here imports Hydra, torch or rich.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TextIO, cast

from ppctl import __version__
from ppctl.cli.console import VisibleText, aligned, folded, note, print_problems, prose, width
from ppctl.errors import ConfigError, PpctlError, Problem
from ppctl.host.files import refused, silence

USAGE, BROKEN_PIPE, INTERRUPTED = 2, 141, 130


@dataclass(frozen=True, slots=True)
class Command:
    """One line of `--help`."""

    summary: str
    overrides: bool = False
    """Whether it takes KEY=VALUE overrides and Megatron's flags."""
    place: str = ""
    """`module.function` in `ppctl/cli/` if that is not `<command>.run`."""


COMMANDS = {
    "train": Command("train a model", overrides=True),
    "plan": Command("check a config and show what train would do; no torch, no GPU", overrides=True),
    "search": Command("find the fastest configuration of a model on a number of GPUs", overrides=True),
    "rehearse": Command("measure memory, host waits and messages at full size", overrides=True),
    "layout": Command("check and draw a pipeline layout"),
    "simulate": Command("simulate and draw a schedule from the times of its operations"),
    "recipes": Command("list, show or copy recipes"),
    "resume": Command("continue a run from its last checkpoint", overrides=True),
    "node": Command("train on several hosts: start this one's ranks, and start them again", overrides=True),
    "ckpt": Command("show, verify, compare, average, prune, import or export checkpoints"),
    "generate": Command("continue a prompt with the weights of a run or a directory"),
    "data": Command("tokenize text into .bin and .idx files, or show data"),
    "runs": Command("list, show, compare or delete runs", place="runs_command.run"),
    "submit": Command("submit a run to SLURM or Kubernetes", overrides=True),
    "status": Command("show the state of a run"),
    "logs": Command("show the output of a run"),
    "trace": Command("show where the time of a measured step went (log.trace)"),
    "parity": Command("compare a cut with one process, or two runs", overrides=True),
    "cancel": Command("cancel the job of a submitted run", place="jobs.cancel"),
    "requeue": Command("requeue the job of a submitted run", place="jobs.requeue"),
    "doctor": Command("check this machine, and measure messages between ranks"),
    "explain": Command("explain an error code or a configuration key"),
    "completion": Command("print a script that completes ppctl's words in bash, zsh or fish"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own) and return its exit code. A user's error is printed."""
    _open_closed_streams()
    with redirect_stdout(cast(TextIO, VisibleText(sys.stdout))), redirect_stderr(cast(TextIO, VisibleText(sys.stderr))):
        return _main(list(sys.argv[1:] if argv is None else argv))


def _main(tokens: list[str]) -> int:
    try:
        code = _dispatch(tokens)
        sys.stdout.flush()
        return code
    except PpctlError as error:
        print_problems(error.problems)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)  # the reader of the pipe (`| head`) has ended
        return BROKEN_PIPE
    except OSError as error:
        if (problem := refused(error)) is None:
            raise
        if error.filename is None:
            silence(sys.stdout)
        print_problems([problem])
        return 1
    except SystemExit as stop:  # argparse: --help, or a usage error that it has printed
        return stop.code if isinstance(stop.code, int) else USAGE


def _open_closed_streams() -> None:
    """Open /dev/null in place of a stdout or stderr that the shell has closed (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _dispatch(tokens: list[str]) -> int:
    if not tokens or tokens[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if tokens else USAGE
    if tokens[0] == "--version":
        print(f"ppctl {__version__}")
        return 0
    name, *rest = tokens
    if name not in COMMANDS:
        raise ConfigError(_unknown_command(name))
    place, _, function = (COMMANDS[name].place or f"{name}.run").partition(".")
    module = importlib.import_module(f"ppctl.cli.{place}")
    return int(getattr(module, function)(parse(name, module, rest)))


def _help() -> str:
    lines = [
        "usage: ppctl COMMAND [arguments]",
        "",
        "Pipeline-parallel training of language models from one config.",
        "",
        aligned(folded(((f"  {name}", command.summary) for name, command in COMMANDS.items()), width(), " ")),
        "",
        "`ppctl COMMAND --help` describes a command's arguments. To begin:",
        "",
        "  ppctl train +recipe=quickstart",
        "  ppctl plan +recipe=deepseek_v3",
    ]
    return "\n".join(lines)


def _unknown_command(name: str) -> Problem:
    import difflib  # only here: the import would slow down every command

    close = next(iter(difflib.get_close_matches(name, COMMANDS, n=1)), "")
    hint = f"did you mean {close}? " if close else ""
    message = f"there is no command {name}; {hint}there are {', '.join(COMMANDS)}"
    return Problem("PP-E116", message, " ".join(filter(None, ("ppctl", close, "--help"))), "command line")


def parse(name: str, module: Any, tokens: Sequence[str]) -> argparse.Namespace:
    """The arguments of command `name`, implemented by `module`. `args.line` has the sorted overrides of a command that
    takes them, `args.typed` the command line."""
    parser = parser_of(name, module)
    if COMMANDS[name].overrides:
        args = parse_overrides(parser, name, tokens)
    else:
        # argparse allows words on both sides of an option only in parsers without subcommands.
        mixed = getattr(module, "INTERMIXED", False)
        args = parser.parse_intermixed_args(tokens) if mixed else parser.parse_args(tokens)
    args.typed = (name, *tokens)
    return args


def parse_overrides(parser: argparse.ArgumentParser, command: str, tokens: Sequence[str]) -> argparse.Namespace:
    """The arguments of `command`, and as `args.line` its overrides with the problems of its words. Adds --recipes-dir
    to the environment of this process."""
    from ppctl.config.argv import normalise  # imports ppctl.config, which other commands do not need
    from ppctl.config.resources import RECIPES_PATH

    own = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    line = normalise(tokens, own, command)
    args, strays = parser.parse_known_args(line.rest)
    if args.recipes_dir:
        # So every process that this command starts, and every later search for recipes, finds it.
        before = os.environ.get(RECIPES_PATH, "")
        os.environ[RECIPES_PATH] = os.pathsep.join([*args.recipes_dir, *filter(None, [before])])
    args.line = replace(line, rest=strays, directories=tuple(args.recipes_dir or ()))
    return args


class _CommandParser(argparse.ArgumentParser):
    """argparse's parser, with errors wrapped like all messages."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error. Raises SystemExit with the exit code of a usage error."""
        self.print_usage(sys.stderr)
        note(f"{self.prog}: error: {message}")
        raise SystemExit(USAGE)


def parser_of(name: str, module: Any) -> argparse.ArgumentParser:
    """The parser of command `name`, implemented by `module`."""
    command = COMMANDS[name]
    first = "RUN" if name == "resume" else "+recipe=NAME"
    parser = _CommandParser(
        prog=f"ppctl {name}",
        usage=f"ppctl {name} [{first}] [KEY=VALUE ...] [options]" if command.overrides else None,
        description=prose([command.summary[:1].upper() + command.summary[1:] + "."], width()),
        epilog=_OVERRIDES_HELP if command.overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.overrides:
        parser.add_argument(
            "--recipes-dir", action="append", metavar="DIR", help="a directory with recipes of your own"
        )
    module.add_arguments(parser)
    return parser


_OVERRIDES_HELP = """\
overrides are KEY=VALUE, with full names (train.steps=200) or short names:
  steps gbs mbs seq lr seed pp vpp tp sp cp ep etp dp layout nodes gpus_per_node
  pp_schedule pp_schedule_csv recompute
Megatron's flags for sizes, layout, batch and sequence are accepted, too:
  --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*3|t*5L'
`ppctl explain KEY` prints the meaning, type and default of a key."""
