"""`ppctl node --rendezvous HOST:PORT [KEY=VALUE ...]`, typed on each of several hosts: this host's part of a run.

The host that has the address plans, makes the run directory and hosts the rendezvous; the other hosts get the run from
it. Then the process on each host becomes its agent (`ppctl.agent`), which starts ranks until the run ends.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import socket
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import NoReturn

from ppctl.cli import resume, train
from ppctl.cli.local_run import first_screen
from ppctl.cli.runs import RUNS, named_run, short_path
from ppctl.config.argv import retyped
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.processes import python
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import go_on, new_run
from ppctl.runs.run_starts import hold

_AGENTS = Started("node")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "a name or address by which all hosts reach the first one, and a free port there"
    parser.add_argument("--rendezvous", required=True, metavar="HOST:PORT", help=words)
    parser.add_argument("--resume", dest="run", metavar="RUN", help="go on with this run, instead of a new one")
    parser.add_argument("--dir", type=Path, default=RUNS, metavar="DIR", help="where RUN is (default: runs)")
    parser.add_argument("--allow", action="store_true", help="with --resume: accept overrides that change results")


def run(args: argparse.Namespace) -> NoReturn:
    """Become this host's agent. Exit codes as for train; 1 also if the rendezvous' host or too many hosts are lost."""
    typed = " ".join([*map(pasted, filter(None, [args.run])), retyped(sorted(args.line.overrides))])
    host, _, port = args.rendezvous.rpartition(":")
    server = _listening(host.strip("[]"), port)
    if server is None:
        _become(host.strip("[]"), port, typed)
    if args.run is None:
        launch = train.prepare(args, _AGENTS, f"node --rendezvous {args.rendezvous}")
        run_dir = new_run(launch, _AGENTS)
    else:
        run_dir = named_run(args)
    with hold(run_dir, strictly=args.run is not None):
        if args.run is not None:
            launch, checkpoint = resume.prepare(args, run_dir, _AGENTS)
            go_on(run_dir, launch, checkpoint)
        print(f"{first_screen(launch.plan)}\n\nrun {short_path(run_dir.path)} on {launch.config.launch.device}\n")
        os.set_inheritable(server.fileno(), True)
        _become(server.getsockname()[0], port, typed, str(run_dir.path), str(server.fileno()))


def _become(*arguments: str) -> NoReturn:
    """Replace this process by the agent."""
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))  # while the agent imports
    os.execve(sys.executable, [*python("ppctl.agent"), *arguments], {"TORCH_CPP_LOG_LEVEL": "3"} | os.environ)


def _listening(host: str, port: str) -> socket.socket | None:
    """The socket of the rendezvous; None if another host or agent has the address. Raises ConfigError (PP-E605) if it
    cannot listen there."""
    try:
        if host in ("", "0.0.0.0", "::") or not (port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("it is no HOST:PORT")
        rows = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        named = list(dict.fromkeys((family, str(address[0])) for family, *_, address in rows))
        beyond = [(family, address) for family, address in named if not ip_address(address.split("%")[0]).is_loopback]
        for family, address in beyond or named:
            try:
                return socket.create_server((address, int(port)), family=family, backlog=socket.SOMAXCONN)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    break
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    except (OSError, ValueError) as error:
        message = f"--rendezvous {host}:{port}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(Problem("PP-E605", message, "--rendezvous host-a:29500", "command line")) from error
    return None
