"""`ppctl node` up to the moment in which it becomes this host's agent."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.runs.rundir import RunDir

TRAIN = ("+recipe=quickstart", "launch.device=cpu", "pp=4", "vpp=1", "nodes=2", "gpus_per_node=2", "launch.spares=1")


class Became(Exception):
    pass


@pytest.fixture
def became(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The arguments of the agent that the command became, on whose terminal torch's C++ is silent."""
    arguments: list[str] = []

    def execute(_: str, command: list[str], environment: Mapping[str, str]) -> None:
        assert environment["TORCH_CPP_LOG_LEVEL"] == os.environ.get("TORCH_CPP_LOG_LEVEL", "3")
        arguments.extend(command[command.index("ppctl.agent") + 1 :])
        raise Became

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "execve", execute)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield arguments
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_the_host_that_has_the_address_makes_the_run_and_serves(became: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(Became):
        main(["node", "--rendezvous", f"localhost:{port}", *TRAIN])
    host, told, typed, run, descriptor = became
    assert (host, told) == ("127.0.0.1", str(port))
    assert {"+recipe=quickstart", "launch.spares=1"} <= set(typed.split())
    config = RunDir(Path(run)).read_config()
    assert (config.launch.nodes, config.launch.spares, config.launch.max_restarts) == (2, 1, 3)
    assert (Path(run) / "secret").stat().st_mode & 0o777 == 0o600
    assert f" node --rendezvous localhost:{port} +recipe=quickstart " in (Path(run) / "command.txt").read_text()
    assert int(descriptor) > 2


@pytest.mark.parametrize("whose", ["another host's", "another agent's"])
def test_any_other_host_joins_and_plans_nothing(became: list[str], tmp_path: Path, whose: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}" if whose == "another agent's" else "192.0.2.7:29500"
        with pytest.raises(Became):
            main(["node", "--rendezvous", address])
    assert became == [*address.split(":"), ""]
    assert not list(tmp_path.iterdir())


def test_the_order_of_words_is_not_compared_with_other_hosts(became: list[str]) -> None:
    for words in (TRAIN, TRAIN[::-1], ("pp=8", *TRAIN)):
        with pytest.raises(Became):
            main(["node", "--rendezvous", "192.0.2.7:29500", *words])
    assert len(became) == 9 and len(set(became[2::3])) == 1


@pytest.mark.parametrize(
    "address",
    ["host-a", ":29500", "127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:99999", "127.0.0.1:", "no.invalid:1", "0.0.0.0:1"],
)
def test_an_address_that_nobody_has_is_refused(
    became: list[str], address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", "--rendezvous", address, *TRAIN]) == 2
    assert "PP-E605" in capsys.readouterr().err
    assert not became


@pytest.mark.parametrize(
    ("more", "code"), [("nodes=3", "PP-E204"), ("launch.partition=gpu", "PP-E629"), ("launch.target=env", "PP-E607")]
)
def test_what_cannot_run_on_these_hosts_is_refused_before_anything_is_made(
    became: list[str], tmp_path: Path, more: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert main(["node", "--rendezvous", f"127.0.0.1:{port}", *TRAIN, more]) == 2
    assert code in capsys.readouterr().err
    assert not became and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "keys", "where"),
    [
        (["train"], ["launch.spares=1"], "takes effect with `ppctl node` and in submitted jobs only"),
        (["train"], ["launch.max_restarts=5"], "takes effect with `ppctl node` and in submitted jobs only"),
        (["submit", "--dry-run"], ["launch.shrink=smaller", "launch.shrink_after=1m"],
         "launch.shrink_after takes effect with `ppctl node` and in jobs of kubernetes only"),
    ],
)  # fmt: skip
def test_other_commands_refuse_what_only_agents_act_on(
    became: list[str], command: list[str], keys: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "+recipe=quickstart", "launch.device=cpu", *keys]) == 2
    said = capsys.readouterr().err
    assert "PP-E629" in said and where in said
    assert "ppctl node --rendezvous HOST:29500 +recipe=quickstart" in said
