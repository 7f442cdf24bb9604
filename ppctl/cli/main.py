"""The front door: finds the command, sorts its arguments, tells problems once, and returns the exit code.

Knows the commands' names, where each lives and what every command shares. Must not know what a command does: each lives
in a module of `ppctl/cli/` (`add_arguments(parser)`, `run(args) -> int`), which is imported only when it is called and
therefore imports all that it needs at its top. Nothing here imports Hydra, torch or rich.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ppctl import __version__
from ppctl.errors import ConfigError, PpctlError, Problem
from ppctl.files import silence

USAGE, BROKEN_PIPE, INTERRUPTED = 2, 141, 130
_UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Command:
    """One line of `--help`."""

    summary: str
    overrides: bool = False
    """Whether it takes KEY=VALUE overrides and Megatron's flags."""
    place: str = ""
    """`module.function` in `ppctl/cli/`, where that is not `<command>.run`."""


COMMANDS = {
    "train": Command("train a model as a config describes it", overrides=True),
    "plan": Command("show what train would do, and check it: no torch, no GPU", overrides=True),
    "layout": Command("parse, check and draw one layout"),
    "simulate": Command("time and draw a schedule from bare costs"),
    "recipes": Command("list, show or copy recipes"),
    "resume": Command("go on from a run's last checkpoint", overrides=True),
    "ckpt": Command("move weights from Hugging Face's directories to checkpoints and back"),
    "data": Command("write Megatron's .bin and .idx from text, and look into them"),
    "runs": Command("list runs"),
    "submit": Command("hand a run to SLURM", overrides=True),
    "status": Command("show how a run is doing"),
    "logs": Command("show what a run has printed"),
    "cancel": Command("end a submitted run", place="jobs.cancel"),
    "requeue": Command("let a submitted run go on", place="jobs.requeue"),
    "doctor": Command("check versions, devices, the file system, and time every edge"),
    "explain": Command("explain an error code or a configuration key"),
}

LATER = (
    "trace", "parity",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's own); returns its exit code. A user's error is told, not raised."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    _open_what_is_closed()
    try:
        code = _dispatch(tokens)
        sys.stdout.flush()
        return code
    except PpctlError as error:
        _tell(error)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)  # the reader (`| head`) has left
        return BROKEN_PIPE
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        silence(sys.stdout)
        _tell(ConfigError(Problem("PP-E127", f"the output cannot be written: {error.strerror}", "df -h", "stdout")))
        return 1
    except SystemExit as stop:  # argparse: --help, or a usage error that it has told
        return stop.code if isinstance(stop.code, int) else USAGE


def _open_what_is_closed() -> None:
    """Python has no stdout or stderr where the shell closed it (`>&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _tell(error: PpctlError) -> None:
    """Print every problem of an error once, on stderr."""
    for text in dict.fromkeys(str(problem) for problem in error.problems):
        print(f"error {text}", file=sys.stderr)


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
    width = max(map(len, COMMANDS))
    lines = [
        "usage: ppctl COMMAND [arguments]",
        "",
        "Train language models through a pipeline of stages that one config describes.",
        "",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "ppctl COMMAND --help tells a command's arguments. To begin:",
        "",
        "  ppctl train +recipe=quickstart",
        "  ppctl plan +recipe=deepseek_v3",
    ]
    return "\n".join(lines)


def _unknown_command(name: str) -> Problem:
    import difflib  # every command would pay for it

    if name in LATER:
        return Problem("PP-E116", f"`ppctl {name}` comes in a later release", "ppctl --help", "command line")
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    remedy = f"ppctl {close[0]} --help" if close else "ppctl --help"
    message = f"there is no command {name}; {hint}there are {', '.join(COMMANDS)}"
    return Problem("PP-E116", message, remedy, "command line")


def parse(name: str, module: Any, tokens: Sequence[str]) -> argparse.Namespace:
    """The arguments of command `name`; `args.overrides` holds its overrides, normalised.

    Raises ConfigError with every problem of the command line, those of the overrides' keys and values included; a
    module that sets TELLS_PROBLEMS gets the former as `args.problems` instead, and tells them with all others.
    """
    parser = _parser(name, module)
    if not COMMANDS[name].overrides:
        # Subcommands do not go together with words on both sides of an option.
        mixed = getattr(module, "INTERMIXED", False)
        return parser.parse_intermixed_args(tokens) if mixed else parser.parse_args(tokens)
    from ppctl.cli import overrides  # the door of the config room, which other commands do not need

    return overrides.parse(parser, name, tokens, tells_problems=getattr(module, "TELLS_PROBLEMS", False))


def _parser(name: str, module: Any) -> argparse.ArgumentParser:
    command = COMMANDS[name]
    usage = f"ppctl {name} [RUN] [KEY=VALUE ...] [options]" if name == "resume" else None
    if command.overrides and usage is None:
        usage = f"ppctl {name} [+recipe=NAME] [KEY=VALUE ...] [options]"
    parser = argparse.ArgumentParser(
        prog=f"ppctl {name}",
        usage=usage,
        description=command.summary[:1].upper() + command.summary[1:] + ".",
        epilog=_OVERRIDES_HELP if command.overrides else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.overrides:
        parser.add_argument("--recipes-dir", action="append", metavar="DIR", help="where your own recipes are, too")
    module.add_arguments(parser)
    return parser


_OVERRIDES_HELP = """\
overrides are KEY=VALUE, with full names (train.steps=200) or short ones:
  steps gbs mbs seq lr pp vpp tp cp ep etp dp layout nodes gpus_per_node
Megatron's flags for sizes, layout, batch and sequence work as well:
  --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*3|t*5L'
`ppctl explain KEY` tells what a key means, its type and its default."""
