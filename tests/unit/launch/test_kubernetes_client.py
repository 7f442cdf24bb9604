"""A run's job in a cluster: no way to it, and what its state makes of the run's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_api import kubeconfig
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.config import kube_config
from urllib3.exceptions import ProtocolError

from ppctl.cli.jobs import combined_state
from ppctl.errors import ConfigError
from ppctl.launch import kubernetes, slurm
from ppctl.launch.environment import Started
from ppctl.launch.planning import planned
from ppctl.launch.run_directory import Launch, new_run
from ppctl.launch.slurm import JobState


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"PP-E660.*not installed") as error:
        kubernetes.state("ppctl-1", "default")
    assert error.value.problems[0].remedy.endswith("-m pip install 'ppctl[kubernetes]'")


def test_without_a_configured_cluster_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="PP-E660: no cluster is configured here"):
        kubernetes.state("ppctl-1", "default")


def test_a_runs_context_is_asked_whichever_is_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several files, as KUBECONFIG may name them."""
    known = kubeconfig(1)
    second = {"clusters": [{"name": "d", "cluster": {"server": "http://127.0.0.1:2"}}], "users": known["users"]}
    second["contexts"] = [{"name": "a/b:6443/u", "context": {"cluster": "d", "user": "u"}}]
    for name, each in (("first", known), ("second", second)):
        (tmp_path / name).write_text(json.dumps(each))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    assert kubernetes._place() == (client, "team-a", "@x")
    assert client.Configuration.get_default_copy().host == "http://127.0.0.1:1"
    assert kubernetes._place("runs@a/b:6443/u") == (client, "runs", "@a/b:6443/u")
    assert client.Configuration.get_default_copy().host == "http://127.0.0.1:2"
    with pytest.raises(ConfigError, match="PP-E660"):
        kubernetes._place("runs@gone")


def test_a_submission_that_is_cut_off_can_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and its cluster are known before the first object is made."""
    words = ["launch.kubernetes.image=none", "launch.kubernetes.claim=runs", f"log.dir={tmp_path}"]
    composed, plan, _ = planned(["+recipe=quickstart", "launch.device=cpu", "launch.target=kubernetes", *words])
    run = new_run(Launch(composed.config, plan, "ppctl submit"), Started("person"))

    def cut(**_: Any) -> None:
        raise KeyboardInterrupt

    api = SimpleNamespace(create_namespaced_custom_object=cut)
    place = SimpleNamespace(CustomObjectsApi=lambda: api), "team-a", "@x"
    monkeypatch.setattr(kubernetes, "_place", lambda cluster="": place)
    with pytest.raises(KeyboardInterrupt):
        kubernetes.submit(run)
    assert (run.job()["job"], run.job()["cluster"]) == (f"ppctl-{run.id}", "team-a@x")


def test_an_object_that_is_going_is_made_again_once_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [409, 409, "made"]

    def create(_request_timeout: float) -> Any:
        answer = answers.pop(0)
        if answer == 409:
            raise ApiException(status=409, reason="Conflict")
        return answer

    monkeypatch.setattr(kubernetes, "_PAUSE", 0.0)
    assert kubernetes._ask("create it", create, may_exist=True) == "made"
    answers[:] = [409]
    with pytest.raises(ConfigError, match="PP-E661: the cluster refused to create it: 409 Conflict"):
        kubernetes._ask("create it", create)


def test_a_log_whose_connection_breaks_ends_with_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(_: int) -> Iterator[bytes]:
        yield b"step 1\n"
        raise ProtocolError("Connection broken: IncompleteRead(0 bytes read)")

    api = SimpleNamespace(read_namespaced_pod_log=lambda *_, **__: SimpleNamespace(stream=stream))
    monkeypatch.setattr(kubernetes, "_place", lambda cluster: (SimpleNamespace(CoreV1Api=lambda: api), "team-a", "@x"))
    monkeypatch.setattr(kubernetes, "_first_pod", lambda *_: "pod-0")
    pieces = kubernetes.log("ppctl-1", "team-a@x", lines=None, follow=True)
    assert next(pieces) == "step 1\n"
    with pytest.raises(ConfigError, match=r"PP-E661.*the log of pod-0.* broke: Connection broken"):
        next(pieces)


@pytest.mark.parametrize(
    ("state", "job", "combined"),
    [
        ("queued", "RUNNING", "running"),
        ("queued", "COMPLETED", "finished"),
        ("queued", "FAILED", "failed"),
        ("stopped", "COMPLETED", "stopped"),
        ("running", "PENDING", "queued"),
        ("interrupted", "", "interrupted"),
    ],
)
def test_a_volume_that_is_not_seen_leaves_the_word_to_the_cluster(state: str, job: str, combined: str) -> None:
    assert combined_state(state, JobState("ppctl-1", "default", job)) == combined


def test_a_jobs_name_says_whose_it_is() -> None:
    assert slurm.is_job("123") and slurm.is_job("123_4") and not slurm.is_job("ppctl-20260101-1a2b")
