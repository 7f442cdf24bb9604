"""Hosts that are cut off from each other, in network namespaces: one side goes on bitwise, the other one ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import TRAIN, Hosts, until
from command import alive, losses, metrics, only_run
from networks import Networks, missing, networks
from oracle.reference import reference_losses

pytestmark = [
    pytest.mark.whole,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SLOW = "slow 3 0 -"


@pytest.fixture
def apart() -> Iterator[Networks]:
    with networks(3) as made:
        yield made


def cut_off(apart: Networks, cwd: Path, text: Path, *words: str, hosts: tuple[int, ...]) -> Hosts:
    """Hosts of which node-1 (with a spare, the one that has ranks) has just lost all others."""
    steps = ("steps=30", f"data.path={text}")
    made = Hosts(cwd, *TRAIN, *steps, *words, hosts=hosts, apart=apart, PPCTL_FAULT=SLOW)
    made.wait_for_step(5)
    apart.cut_off(1 if made.ranks(1) else 2)
    return made


def test_the_side_of_the_store_takes_its_spare_and_the_other_side_ends(
    apart: Networks, tmp_path: Path, text: Path
) -> None:
    hosts = cut_off(apart, tmp_path, text, "launch.spares=1", hosts=(0, 1, 2))
    codes = hosts.ends()
    said = hosts.said()
    assert sorted(codes.values()) == [0, 0, 1] and codes[0] == 0, said
    assert said.count("PP-E656: the host of the rendezvous") == 1
    run = only_run(tmp_path)
    gone = next(number for number, code in codes.items() if code)
    _, second = json.loads((run / "env.json").read_text())["starts"]
    assert second["nodes"] == ["node-0", f"node-{3 - gone}"] and f"node-{gone} has gone" in second["why"]
    assert [record["step"] for record in metrics(run)] == list(range(1, 31))
    assert losses(run) == reference_losses(run, 30)
    assert not list((run / "errors").glob("*.json"))


def test_without_a_spare_one_side_asks_for_a_requeue_and_the_run_goes_on_from_there(
    apart: Networks, tmp_path: Path, text: Path
) -> None:
    words = ("launch.shrink=requeue", "launch.shrink_after=5s")
    hosts = cut_off(apart, tmp_path, text, *words, hosts=(0, 1))
    assert hosts.ends() == {0: 75, 1: 1}, hosts.said()
    run = only_run(tmp_path)
    until(lambda: not alive(tmp_path))
    again = Hosts(tmp_path, "--resume", str(run), hosts=(0, 2), apart=apart)
    assert again.ends() == {0: 0, 2: 0}, again.said()
    assert [record["step"] for record in metrics(run)] == list(range(1, 31))
    assert losses(run) == reference_losses(run, 30)
