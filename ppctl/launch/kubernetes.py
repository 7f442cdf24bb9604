"""A run's objects in a cluster: made, looked at and deleted by the official client, with the kubeconfig's context."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.launch.enter import code_of
from ppctl.launch.kubernetes_objects import API, INDEX_LABEL, KIND, NAME_LABEL, KubernetesJob, as_yaml, objects
from ppctl.launch.run_directory import Launch
from ppctl.launch.slurm import JobState
from ppctl.runs.run_starts import secret_of
from ppctl.runs.rundir import RunDir

_TIMEOUT = 30.0
"""Seconds for each request; of a log, between its pieces there is no limit."""


def submit(run: RunDir) -> str:
    """Submit a run, whose ranks go on from its last checkpoint if there is one; returns the JobSet's name, which
    job.json has from now on. Raises ConfigError: PP-E660 without a cluster, PP-E661 if it refuses."""
    launch = Launch(run.read_config(), run.read_plan(), run.commands()[-1])
    code, secret = run.job().get("code") or code_of(launch.config), secret_of(run)
    text = "none" if secret is None else secret.hex()
    save = max((record["save_s"] for record in run.metrics() if "save_s" in record), default=None)
    listed = objects(KubernetesJob(launch, run.id, code, save), text)
    run.write_script(as_yaml([each for each in listed if each["kind"] != "Secret"]), "submit.yaml")
    name, namespace = _make(listed)
    run.write_job(name, namespace, code=code)
    return name


def submit_again(run: RunDir, job: JobState) -> None:
    """Submit a run whose JobSet has ended, once that is gone. Raises as `submit`."""
    cancel(job.job, job.cluster)
    until = time.monotonic() + _TIMEOUT
    while time.monotonic() < until and state(job.job, job.cluster).state:
        time.sleep(0.5)
    submit(run)


def _make(listed: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    jobset, *others = listed
    name, client = jobset["metadata"]["name"], _client()
    namespace = jobset["metadata"].get("namespace") or _namespace()
    create = client.CustomObjectsApi().create_namespaced_custom_object
    made = _ask("create the JobSet", create, namespace=namespace, body=jobset, **KIND)
    # The others go with the JobSet, whose pods wait for them.
    owner = {"apiVersion": API, "kind": "JobSet", "name": name, "uid": made["metadata"]["uid"]}
    core = client.CoreV1Api()
    makers = {"ConfigMap": core.create_namespaced_config_map, "Secret": core.create_namespaced_secret}
    try:
        for each in others:
            body = {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
            _ask(f"create the {each['kind']}", makers[each["kind"]], namespace, body)
    except BaseException:
        cancel(name, namespace)
        raise
    return name, namespace


def state(job: str, cluster: str) -> JobState:
    """The state of the JobSet `job` in the namespace `cluster`. Raises ConfigError."""
    client = _client()
    get = client.CustomObjectsApi().get_namespaced_custom_object
    jobset = _ask("read the JobSet", get, namespace=cluster, name=job, may_be_missing=True, **KIND)
    if jobset is None:
        return JobState(job, cluster)
    status = jobset.get("status", {})
    held = {each["type"]: each for each in status.get("conditions", ()) if each["status"] == "True"}
    for condition, word in (("Completed", "COMPLETED"), ("Failed", "FAILED")):
        if condition in held:
            reason = held[condition].get("message", "") if word == "FAILED" else ""
            return JobState(job, cluster, word, reason)
    if "deletionTimestamp" in jobset["metadata"]:
        return JobState(job, cluster, "COMPLETING")
    if jobset["spec"].get("suspend"):
        return JobState(job, cluster, "PENDING", "suspended: its queue has not admitted it, or somebody holds it")
    pods = _pods(client, job, cluster)
    running = [pod for pod in pods if pod.status.phase == "Running"]
    said = [f"the JobSet has restarted {status['restarts']} times"] if status.get("restarts") else []
    said += [f"{pod.metadata.name}: {_waits_for(pod)}" for pod in pods if pod.status.phase == "Pending"][:1]
    nodes = ",".join(sorted({pod.spec.node_name for pod in running if pod.spec.node_name}))
    reason = "; ".join(said) or ("" if pods else "no pod yet")
    return JobState(job, cluster, "RUNNING" if running else "PENDING", reason, nodes=nodes)


def _waits_for(pod: Any) -> str:
    waiting = [each.state.waiting for each in pod.status.container_statuses or () if each.state and each.state.waiting]
    unmet = [each for each in pod.status.conditions or () if each.type == "PodScheduled" and each.status != "True"]
    said = next(iter([*waiting, *unmet]), None)
    return "pending" if said is None else f"{said.reason}: {said.message or ''}"


def cancel(job: str, cluster: str) -> None:
    """Delete the JobSet with all its pods, which have their grace to save. Raises ConfigError."""
    delete = _client().CustomObjectsApi().delete_namespaced_custom_object
    words: dict[str, Any] = {"propagation_policy": "Foreground", "may_be_missing": True}
    _ask("delete the JobSet", delete, namespace=cluster, name=job, **words, **KIND)


def restart(job: str, cluster: str) -> None:
    """Evict pod 0: all ranks save and stop at one step, and go on when its successor has come. Raises ConfigError."""
    client = _client()
    name = _first_pod(client, job, cluster)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": cluster}}
    _ask(f"evict {name}", client.CoreV1Api().create_namespaced_pod_eviction, name, cluster, eviction)


def log(job: str, cluster: str, *, lines: int | None, follow: bool) -> Iterator[str]:
    """The output of pod 0, the newest of its index, piece by piece; with `follow` until it ends. Raises ConfigError."""
    client = _client()
    name, read = _first_pod(client, job, cluster), client.CoreV1Api().read_namespaced_pod_log
    words: dict[str, Any] = {"follow": follow, "tail_lines": lines, "_preload_content": False}
    answer = _ask(f"read the log of {name}", read, name, cluster, **words)
    yield from (piece.decode("utf-8", "replace") for piece in answer.stream(2**16))


def _first_pod(client: Any, job: str, namespace: str) -> str:
    """The name of pod 0, the newest of its index. Raises ConfigError (PP-E661) if it has not begun."""
    pods = sorted(_pods(client, job, namespace, "0"), key=lambda pod: str(pod.metadata.creation_timestamp))
    if not pods or pods[-1].status.phase == "Pending":
        message = f"pod 0 of {job} has not begun, and only a run that goes on can save and has a log"
        raise ConfigError(Problem("PP-E661", message, f"ppctl status {pasted(job)}", job))
    return str(pods[-1].metadata.name)


def _pods(client: Any, job: str, namespace: str, index: str | None = None) -> list[Any]:
    selector = f"{NAME_LABEL}={job}" + (f",{INDEX_LABEL}={index}" if index is not None else "")
    return list(_ask("list the pods", client.CoreV1Api().list_namespaced_pod, namespace, label_selector=selector).items)


def _client() -> Any:
    """The client's module, with the kubeconfig's current context, or within a cluster with its own. Raises ConfigError
    (PP-E660) without the package, and without either."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        message = "the package kubernetes, which speaks to clusters, is not installed"
        remedy = f"{pasted(sys.executable)} -m pip install 'ppctl[kubernetes]'"
        raise ConfigError(Problem("PP-E660", message, remedy)) from error
    try:
        config.load_config()
    except config.ConfigException as error:
        message = f"no cluster is configured here: {' '.join(str(error).split())}"
        raise ConfigError(Problem("PP-E660", message, "kubectl config get-contexts", "KUBECONFIG")) from error
    return client


def _namespace() -> str:
    from kubernetes import config

    try:
        return str(config.list_kube_config_contexts()[1]["context"].get("namespace") or "default")
    except config.ConfigException:  # within a cluster
        return "default"


def _ask(what: str, call: Callable[..., Any], *arguments: Any, may_be_missing: bool = False, **named: Any) -> Any:
    """The cluster's answer to a request; None for an object that there is not. Raises ConfigError (PP-E661)."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    limit = {} if named.get("follow") else {"_request_timeout": _TIMEOUT}
    try:
        return call(*arguments, **limit, **named)
    except ApiException as error:
        if may_be_missing and error.status == 404:
            return None
        try:
            words = json.loads(error.body)["message"]
        except (TypeError, ValueError, LookupError):
            words = error.reason
        message, remedy = f"the cluster refused to {what}: {error.status} {words}", "kubectl auth can-i --list"
        raise ConfigError(Problem("PP-E661", message, remedy, "cluster")) from error
    except HTTPError as error:
        message = f"the cluster did not answer when asked to {what}: {error}"
        raise ConfigError(Problem("PP-E661", message, "kubectl cluster-info", "cluster")) from error
