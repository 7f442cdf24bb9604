"""A run's objects in a cluster: made, looked at and deleted by the official client.

`cluster` is NAMESPACE@CONTEXT: commands use the context of the kubeconfig with which the run was submitted, even if
another is current now. Within a cluster it is only a namespace.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError, Problem, pasted, pip_install
from ppctl.launch.enter import code_of
from ppctl.launch.kubernetes_objects import API, FIRST_POD, KIND, NAME_LABEL, KubernetesJob, as_yaml, objects
from ppctl.launch.run_directory import Launch
from ppctl.launch.slurm import JobState
from ppctl.runs.run_starts import secret_of
from ppctl.runs.rundir import RunDir

_TIMEOUT = 30.0
"""Seconds for each request, and for an object to be gone. There is no limit between pieces of a log."""
_PAUSE = 0.5
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def submit(run: RunDir) -> str:
    """Submit a run, to the cluster where it was before if there is one; it goes on from its last checkpoint, if any.
    Returns the JobSet's name. Raises ConfigError: PP-E660 without a cluster, PP-E661 if that refuses."""
    launch = Launch(run.read_config(), run.read_plan(), run.commands()[-1])
    code, secret = run.job().get("code") or code_of(launch.config), secret_of(run)
    text = "none" if secret is None else secret.hex()
    jobset, *others = objects(KubernetesJob(launch, run.id, code, run.metrics()), text)
    run.write_script(as_yaml([jobset, *(each for each in others if each["kind"] != "Secret")]), "submit.yaml")
    client, namespace, context = _place(run.job().get("cluster", ""))
    name, namespace = str(jobset["metadata"]["name"]), jobset["metadata"].get("namespace") or namespace
    # first, so that an interrupted submission can be seen and cancelled
    run.write_job(name, namespace + context, code=code)
    create = client.CustomObjectsApi().create_namespaced_custom_object
    made = _ask("create the JobSet", create, namespace=namespace, body=jobset, may_exist=True, **KIND)
    # The cluster deletes the other objects with the JobSet, whose pods wait until they exist.
    owner = {"apiVersion": API, "kind": "JobSet", "name": name, "uid": made["metadata"]["uid"]}
    core = client.CoreV1Api()
    makers = {"ConfigMap": core.create_namespaced_config_map, "Secret": core.create_namespaced_secret}
    try:
        for each in others:
            body = {**each, "metadata": {**each["metadata"], "ownerReferences": [owner]}}
            _ask(f"create the {each['kind']}", makers[each["kind"]], namespace, body, may_exist=True)
    except BaseException:
        cancel(name, namespace + context)
        raise
    return name


def submit_again(run: RunDir, job: JobState) -> None:
    """Submit a run again, after its ended JobSet is gone. Raises as `submit`."""
    cancel(job.job, job.cluster)
    submit(run)


def state(job: str, cluster: str) -> JobState:
    """The state of the JobSet `job`; an empty one if it does not exist. Raises ConfigError."""
    client, namespace, _ = _place(cluster)
    get = client.CustomObjectsApi().get_namespaced_custom_object
    jobset = _ask("read the JobSet", get, namespace=namespace, name=job, may_be_missing=True, **KIND)
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
    pods = _pods(client, job, namespace)
    running = [pod for pod in pods if pod.status.phase == "Running"]
    reasons = [f"the JobSet has restarted {status['restarts']} times"] if status.get("restarts") else []
    reasons += [f"{pod.metadata.name}: {_waits_for(pod)}" for pod in pods if pod.status.phase == "Pending"][:1]
    nodes = ",".join(sorted({pod.spec.node_name for pod in running if pod.spec.node_name}))
    reason = "; ".join(reasons) or ("" if pods else "no pod yet")
    return JobState(job, cluster, "RUNNING" if running else "PENDING", reason, nodes=nodes)


def _waits_for(pod: Any) -> str:
    waiting = [each.state.waiting for each in pod.status.container_statuses or () if each.state and each.state.waiting]
    unmet = [each for each in pod.status.conditions or () if each.type == "PodScheduled" and each.status != "True"]
    said = next(iter([*waiting, *unmet]), None)
    return "pending" if said is None else f"{said.reason}: {said.message or ''}"


def cancel(job: str, cluster: str) -> None:
    """Delete the JobSet with all its pods, which have their grace period to save. Raises ConfigError."""
    client, namespace, _ = _place(cluster)
    delete = client.CustomObjectsApi().delete_namespaced_custom_object
    words: dict[str, Any] = {"propagation_policy": "Foreground", "may_be_missing": True}
    _ask("delete the JobSet", delete, namespace=namespace, name=job, **words, **KIND)


def restart(job: str, cluster: str) -> None:
    """Evict pod 0: all ranks save and stop at one step, and go on when a new pod 0 has come. Raises ConfigError."""
    client, namespace, _ = _place(cluster)
    name = _first_pod(client, job, namespace)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    _ask(f"evict {name}", client.CoreV1Api().create_namespaced_pod_eviction, name, namespace, eviction)


def log(job: str, cluster: str, *, lines: int | None, follow: bool) -> Iterator[str]:
    """The output of the newest pod of index 0, piece by piece; with `follow` until it ends. Raises ConfigError."""
    client, namespace, _ = _place(cluster)
    from urllib3.exceptions import HTTPError

    name, read = _first_pod(client, job, namespace), client.CoreV1Api().read_namespaced_pod_log
    words: dict[str, Any] = {"follow": follow, "tail_lines": lines, "_preload_content": False}
    answer = _ask(what := f"read the log of {name}", read, name, namespace, **words)
    try:
        yield from (piece.decode("utf-8", "replace") for piece in answer.stream(2**16))
    except HTTPError as error:
        raise _silence(what, error) from error


def _first_pod(client: Any, job: str, namespace: str) -> str:
    """The name of the newest pod of index 0. Raises ConfigError (PP-E661) if it has not begun."""
    pods = sorted(_pods(client, job, namespace, f",{FIRST_POD}"), key=lambda pod: str(pod.metadata.creation_timestamp))
    if not pods or pods[-1].status.phase == "Pending":
        message = f"pod 0 of {job} has not begun: there is no log yet, and nothing to save"
        raise ConfigError(Problem("PP-E661", message, f"ppctl status {pasted(job)}", job))
    return str(pods[-1].metadata.name)


def _pods(client: Any, job: str, namespace: str, more: str = "") -> list[Any]:
    selector = f"{NAME_LABEL}={job}{more}"
    return list(_ask("list the pods", client.CoreV1Api().list_namespaced_pod, namespace, label_selector=selector).items)


def _place(cluster: str = "") -> tuple[Any, str, str]:
    """(the client's module, the namespace, `@` with the context) of `cluster`: if empty, of the kubeconfig's current
    context or of the cluster around this process. Raises ConfigError (PP-E660) without the package or a cluster."""
    namespace, at, context = cluster.partition("@")
    try:
        from kubernetes import client, config
    except ImportError as error:
        message = "the package kubernetes, which speaks to clusters, is not installed"
        raise ConfigError(Problem("PP-E660", message, pip_install("ppctl[kubernetes]"))) from error
    try:
        try:
            config.load_kube_config(context=context or None)
        except config.ConfigException:
            if at or "KUBERNETES_SERVICE_HOST" not in os.environ:
                raise
            config.load_incluster_config()
            return client, namespace or _OWN_NAMESPACE.read_text().strip(), ""
        if not cluster:
            current = config.list_kube_config_contexts()[1]
            namespace, context = current["context"].get("namespace") or "default", current["name"]
    except config.ConfigException as error:
        message = f"no cluster is configured here: {' '.join(str(error).split())}"
        raise ConfigError(Problem("PP-E660", message, "kubectl config get-contexts", "KUBECONFIG")) from error
    return client, namespace, f"@{context}" if context else ""


def _ask(
    what: str,
    call: Callable[..., Any],
    *arguments: Any,
    may_be_missing: bool = False,
    may_exist: bool = False,
    **named: Any,
) -> Any:
    """The cluster's answer to a request; None if the object `may_be_missing` and is. If one is there that `may_exist`,
    since it is being deleted, asks again for a while. Raises ConfigError (PP-E661)."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    limit = {} if named.get("follow") else {"_request_timeout": _TIMEOUT}
    until = time.monotonic() + _TIMEOUT * may_exist
    while True:
        try:
            return call(*arguments, **limit, **named)
        except ApiException as error:
            if may_be_missing and error.status == 404:
                return None
            if error.status != 409 or time.monotonic() > until:
                raise _refusal(what, error) from error
            time.sleep(_PAUSE)
        except HTTPError as error:
            raise _silence(what, error) from error


def _silence(what: str, error: Exception) -> ConfigError:
    message = f"the cluster did not answer when asked to {what}, or the connection broke: {error}"
    return ConfigError(Problem("PP-E661", message, "kubectl cluster-info", "cluster"))


def _refusal(what: str, error: Any) -> ConfigError:
    try:
        words = json.loads(error.body or "")["message"]
    except (TypeError, ValueError, LookupError):
        words = error.reason
    message, remedy = f"the cluster refused to {what}: {error.status} {words}", "kubectl auth can-i --list"
    return ConfigError(Problem("PP-E661", message, remedy, "cluster"))
