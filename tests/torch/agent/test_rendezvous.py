"""The rendezvous of agents: whose state is read, who takes part, and who is refused."""

from __future__ import annotations

import pickle
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, _NodeDescGenerator

from ppctl.agent import rendezvous
from ppctl.agent.rendezvous import CAME, NodeRendezvous
from ppctl.errors import TrainingError


@pytest.fixture(autouse=True)
def _agents_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has them in its environment: else torch would make a store at an address with the agent's name."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # torch looks through the stack for every record of its own: with pytest's, longer than signs of life may take.
    monkeypatch.setattr(f"{DynamicRendezvousHandler.__module__}.get_method_name", lambda depth=2: "")


def agent(store: HashStore, name: str, nodes: int = 2, spares: int = 0, key: bytes = b"key") -> NodeRendezvous:
    return NodeRendezvous.over(store, "job", key, nodes, spares, name)


def meet(*agents: NodeRendezvous) -> list[int]:
    """The numbers that agents get which meet at once."""
    found: dict[int, int] = {}

    def join(number: int) -> None:
        found[number] = agents[number].next_rendezvous().rank

    threads = [threading.Thread(target=join, args=(number,), daemon=True) for number in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[number] for number in range(len(agents))]


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("proof", [b"", bytes(32)])
def test_a_state_that_no_agent_of_the_run_wrote_is_not_unpickled(tmp_path: Path, proof: bytes) -> None:
    import base64

    store = HashStore()
    own = agent(store, "0 node-0")
    store.set("torch.rendezvous.job", base64.b64encode(proof + pickle.dumps(Evil(tmp_path / "made"))).decode())
    with pytest.raises(TrainingError, match="from nobody who knows this start's secret"):
        own.next_rendezvous()
    assert not (tmp_path / "made").exists()


def test_an_agent_with_another_secret_neither_reads_nor_changes_the_state() -> None:
    store = HashStore()
    assert sorted(meet(agent(store, "0 node-0"), agent(store, "1 node-1"))) == [0, 1]
    before = store.get("torch.rendezvous.job")
    with pytest.raises(TrainingError):
        agent(store, "1 node-2", key=b"another").next_rendezvous()
    assert store.get("torch.rendezvous.job") == before


def test_the_host_of_the_store_comes_first_and_a_full_life_needs_nobody() -> None:
    store = HashStore()
    second, first = agent(store, "1 a"), agent(store, "0 z")
    assert meet(second, first) == [1, 0]
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (0, 0)


def test_the_successor_of_a_lost_pod_is_another_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container it has the name and the process's number of the one before."""
    store, alike = HashStore(), []
    for _ in range(2):
        monkeypatch.setattr(NodeRendezvous, "_node_desc_generator", _NodeDescGenerator())
        alike.append(agent(store, "1 node-1")._this_node)
    assert alike[0] != alike[1]
    assert [node.addr.split()[:2] for node in alike] == [["1", "node-1"]] * 2


def test_in_pods_the_first_meeting_has_no_limit() -> None:
    store = HashStore()
    patient, late = agent(store, "0 node-0"), agent(store, "1 node-1")
    patient.all_come = True
    patient.settings.timeout._set_timeouts(join=timedelta(seconds=1))
    found: list[int] = []
    waits = threading.Thread(target=lambda: found.append(patient.next_rendezvous().rank), daemon=True)
    waits.start()
    waits.join(3)
    assert waits.is_alive()
    assert late.next_rendezvous().rank == 1
    waits.join(30)
    assert found == [0]


def test_a_spare_lets_the_nodes_meet_first_and_takes_the_place_of_one_that_does_not_come() -> None:
    store = HashStore()
    spare, first, late = agent(store, "2 spare"), agent(store, "0 node-0"), agent(store, "1 node-1")
    spare.stands_back = 30.0
    threads = [threading.Thread(target=each.next_rendezvous, daemon=True) for each in (spare, first)]
    for thread in threads:
        thread.start()
        thread.join(1)
    assert late.next_rendezvous().rank == 1
    assert spare._this_node not in late._state_holder.state.participants
    others = HashStore()
    spare, first = agent(others, "2 spare"), agent(others, "0 node-0")
    spare.stands_back = 1.0
    assert meet(spare, first) == [1, 0]


def test_an_agent_that_goes_calls_the_others_even_if_nobody_waits() -> None:
    store = HashStore()
    first, second = agent(store, "0 node-0"), agent(store, "1 node-1")
    meet(first, second)
    second._stop_heartbeats()
    for handler in (first, second):
        handler._state_holder._cache_duration = 0  # type: ignore[attr-defined]
    state = first._state_holder.state
    del state.participants[second._this_node]
    first._state_holder.mark_dirty()
    first._state_holder.sync()
    assert (first.num_nodes_waiting(), second.num_nodes_waiting()) == (1, 1)


def test_a_spare_that_still_imports_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job to which nobody else comes, a loss in its first seconds waits for the spare."""
    monkeypatch.setattr(rendezvous, "_SINCE", time.monotonic())
    store = HashStore()
    store.add(CAME, 2)
    first, second = agent(store, "0 node-0", spares=1), agent(store, "1 node-1", spares=1)
    first.nobody_comes = True
    meet(first, second)
    monkeypatch.setattr(rendezvous, "LOST", 0.2)
    second._stop_heartbeats()
    holder = first._state_holder
    holder._cache_duration = 0  # type: ignore[attr-defined]
    del holder.state.participants[second._this_node], holder.state.last_heartbeats[second._this_node]
    holder.mark_dirty()
    holder.sync()
    for _ in range(5):
        assert first.num_nodes_waiting() == 1
        time.sleep(0.1)
    store.add(CAME, 1)  # the spare; and then it is lost as well
    with pytest.raises(RendezvousTimeoutError):
        for _ in range(5):
            first.num_nodes_waiting()
            time.sleep(0.1)


def test_all_agents_give_up_one_that_never_came_when_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have begun at different times, and would plan a run of the hosts that are left at different times."""
    store = HashStore()
    first, second = agent(store, "0 node-0", spares=1), agent(store, "1 node-1", spares=1)
    store.add(CAME, 2)
    monkeypatch.setattr(rendezvous, "_SINCE", time.monotonic())
    assert first._one_comes() and second._one_comes()
    monkeypatch.setattr(rendezvous, "_SINCE", time.monotonic() - 600.0)
    assert not first._one_comes()
    monkeypatch.setattr(rendezvous, "_SINCE", time.monotonic())
    assert not second._one_comes()


def test_a_store_that_did_not_answer_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer would be taken for that to another question."""
    own, asked = agent(HashStore(), "0 node-0"), []

    def fail(*words: str) -> None:
        asked.append(words)
        raise RuntimeError("Socket Timeout")

    backend = own._state_holder._backend  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "_store", SimpleNamespace(get=fail))
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError):
            backend.get_state()
    with pytest.raises(RendezvousConnectionError):
        own._one_comes()
    assert len(asked) == 1
