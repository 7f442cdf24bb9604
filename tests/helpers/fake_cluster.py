"""The tests' own Kubernetes: an API server for the official client, the controllers of JobSet and Job, and a kubelet.

A pod is the process tree of its container's command, with the manifest's variables. What a machine would give it is
made up: its host name, the ConfigMap's files in a directory of their own, and the rendezvous' name and port, which are
this machine's. Objects are refused as `cluster_rules` says.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cluster_rules import immutable_fields, problems
from command import environment, free_port

_LOOK = 0.05
_NAMESPACE = "team-a"


@dataclass
class Pod:
    """One pod and its process."""

    name: str
    uid: str
    index: int
    jobset: str
    spec: dict[str, Any]
    log: Path
    created: float = field(default_factory=time.time)
    phase: str = "Pending"
    why: str = ""
    """Why it is not scheduled."""
    process: subprocess.Popen[bytes] | None = None
    end_by: float | None = None
    """When its grace is over, if it was told to go."""
    disrupted: bool = False
    code: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The pod as the API shows it."""
        labels = {
            "jobset.sigs.k8s.io/jobset-name": self.jobset,
            "batch.kubernetes.io/job-completion-index": str(self.index),
        }
        unmet = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.why}]
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.created)) + f".{int(self.created % 1 * 1e6):06}Z"
        return {
            "metadata": {"name": self.name, "uid": self.uid, "labels": labels, "creationTimestamp": began},
            "spec": {
                "containers": self.spec["containers"],
                **({} if self.why else {"nodeName": f"machine-{self.index}"}),
            },
            "status": {"phase": self.phase, **({"conditions": unmet} if self.why else {})},
        }


class Cluster:
    """A cluster of this machine; `unschedulable` are the indexes that no machine has room for."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home, self.variables = home, variables
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.gone: list[Pod] = []
        """Pods that were replaced or deleted, with their ends."""
        self.failures: dict[int, int] = {}
        self.unschedulable: set[int] = set()
        self.lock = threading.RLock()
        self._port = free_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"cluster": self}))
        self._over = threading.Event()
        self.kubeconfig = home / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(_kubeconfig(self._server.server_port)))

    def __enter__(self) -> Cluster:
        for work in (self._server.serve_forever, self._reconcile):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.shutdown()
        with self.lock:
            for pod in self.pods:
                self._kill(pod)

    # What happens to pods

    def running(self, index: int) -> Pod | None:
        """The pod of an index that runs."""
        with self.lock:
            return next((pod for pod in self.pods if pod.index == index and pod.phase == "Running"), None)

    def kill(self, index: int) -> None:
        """Lose the machine of a pod: all its processes are gone at once."""
        pod = self.running(index)
        assert pod is not None
        with self.lock:
            self._kill(pod)

    def evict(self, name: str) -> None:
        """Take a pod away as a drain does."""
        with self.lock:
            for pod in self.pods:
                if pod.name == name:
                    pod.disrupted = True
                    self._end(pod)

    def suspend(self, job: str, value: bool) -> None:
        """Do as Kueue does: hold or admit a JobSet."""
        with self.lock:
            before = self.objects["jobsets", job]
            after = {**before, "spec": {**before["spec"], "suspend": value}}
            assert immutable_fields(before, after) == []
            self.objects["jobsets", job] = after

    def condition(self, job: str) -> str:
        """`Completed`, `Failed` or nothing yet."""
        with self.lock:
            found = self.objects.get(("jobsets", job), {}).get("status", {}).get("conditions", ())
            return next((each["type"] for each in found), "")

    def ends_of(self, index: int) -> list[int | None]:
        """The exit codes of the pods of an index that are no more."""
        return [pod.code for pod in self.gone if pod.index == index]

    # Controllers

    def _reconcile(self) -> None:
        while not self._over.wait(_LOOK):
            with self.lock:
                for kind, name in list(self.objects):
                    if kind == "jobsets":
                        self._jobset(name, self.objects[kind, name])

    def _jobset(self, name: str, jobset: dict[str, Any]) -> None:
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        own = [pod for pod in self.pods if pod.jobset == name]
        for pod in own:
            self._look_at(pod)
        if self.condition(name):
            return
        if "deletionTimestamp" in jobset["metadata"] or jobset["spec"].get("suspend"):
            self._empty(name, own, deleted="deletionTimestamp" in jobset["metadata"])
        elif all(self._failed(pod, jobset, job) for pod in own if pod.phase == "Failed"):
            if len([pod for pod in own if pod.phase == "Succeeded"]) == job["completions"]:
                self._conclude(jobset, "Completed", "AllJobsCompleted")
            for index in set(range(job["completions"])) - {pod.index for pod in self.pods if pod.jobset == name}:
                self.pods.append(self._new(name, index, job["template"]["spec"]))
            for pod in [pod for pod in self.pods if pod.jobset == name and pod.phase == "Pending"]:
                self._start(pod)

    def _empty(self, name: str, own: list[Pod], *, deleted: bool) -> None:
        """End a job's pods, and with the last of a deleted JobSet all that it owns."""
        for pod in own:
            self._end(pod)
            if pod.phase in ("Succeeded", "Failed"):
                self._forget(pod)
        if deleted and not any(pod.jobset == name for pod in self.pods):
            for kind in ("jobsets", "configmaps", "secrets"):
                self.objects.pop((kind, name), None)

    def _failed(self, pod: Pod, jobset: dict[str, Any], job: dict[str, Any]) -> bool:
        """Follow podFailurePolicy for a pod that has failed; returns whether the job goes on."""
        action = next((rule["action"] for rule in job["podFailurePolicy"]["rules"] if _fits(rule, pod)), "Count")
        self._forget(pod)
        if action == "FailJob":
            message = f"pod {pod.name} failed with exit code {pod.code} matching a FailJob rule"
            assert jobset["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
            self._conclude(jobset, "Failed", "FailJobSet", message)
            return False
        if action == "Count":
            self.failures[pod.index] = self.failures.get(pod.index, 0) + 1
        if action == "FailIndex" or self.failures.get(pod.index, 0) > job["backoffLimitPerIndex"]:
            self._restart(jobset)
            return False
        return True

    def _restart(self, jobset: dict[str, Any]) -> None:
        status = jobset.setdefault("status", {})
        if status.get("restarts", 0) >= jobset["spec"]["failurePolicy"]["maxRestarts"]:
            self._conclude(jobset, "Failed", "ReachedMaxRestarts")
            return
        status["restarts"] = status.get("restarts", 0) + 1
        self.failures.clear()
        for pod in [pod for pod in self.pods if pod.jobset == jobset["metadata"]["name"]]:
            self._kill(pod)
            self._forget(pod)

    def _conclude(self, jobset: dict[str, Any], kind: str, reason: str, message: str = "") -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        jobset.setdefault("status", {})["conditions"] = [condition]
        for pod in self.pods:
            if pod.jobset == jobset["metadata"]["name"]:
                self._end(pod)

    def _forget(self, pod: Pod) -> None:
        self.pods.remove(pod)
        self.gone.append(pod)

    # The kubelet

    def _new(self, job: str, index: int, spec: dict[str, Any]) -> Pod:
        uid = uuid.uuid4().hex
        name = f"{job}-node-0-{index}-{uid[:5]}"
        return Pod(name, uid, index, job, spec, self.home / f"{name}.log")

    def _start(self, pod: Pod) -> None:
        pod.why = "0/2 nodes are available: insufficient nvidia.com/gpu" if pod.index in self.unschedulable else ""
        files, secret = (self.objects.get((kind, pod.jobset)) for kind in ("configmaps", "secrets"))
        if pod.why or files is None or secret is None:
            return
        place = self.home / pod.uid
        place.mkdir()
        for file, text in files["data"].items():
            (place / file).write_text(text)
        for file, text in files["binaryData"].items():
            (place / file).write_bytes(base64.b64decode(text))
        (container,) = pod.spec["containers"]
        mounted = next(each["mountPath"] for each in container["volumeMounts"] if each["name"] == "files")
        words = [
            str(place) if word == mounted else word.replace("$$", "$")
            for word in container["command"] + container["args"]
        ]
        variables = {each["name"]: _value(each, pod, secret) for each in container["env"]}
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(self._port)}
        made_up = {"SLURMD_NODENAME": pod.name, "POD_UID": pod.uid}
        with open(pod.log, "wb") as log:
            pod.process = subprocess.Popen(
                words, cwd=place, env=environment(**self.variables) | variables | made_up,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        pod.phase = "Running"

    def _look_at(self, pod: Pod) -> None:
        if pod.phase != "Running" or pod.process is None:
            return
        if pod.end_by is not None and time.monotonic() > pod.end_by:
            self._kill(pod)
        code = pod.process.poll()
        if code is not None:
            self._kill(pod)  # with its first process a container has none any more
            pod.code = code if code >= 0 else 128 - code
            pod.phase = "Failed" if code else "Succeeded"

    def _end(self, pod: Pod) -> None:
        """Tell a pod to go."""
        if pod.end_by is None and pod.phase == "Running" and pod.process is not None:
            pod.process.send_signal(signal.SIGTERM)
            pod.end_by = time.monotonic() + pod.spec["terminationGracePeriodSeconds"]
        elif pod.phase == "Pending":
            pod.phase = "Failed"

    def _kill(self, pod: Pod) -> None:
        mark = f"POD_UID={pod.uid}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


def _fits(rule: dict[str, Any], pod: Pod) -> bool:
    if "onPodConditions" in rule:
        return pod.disrupted
    return pod.code in rule["onExitCodes"]["values"]


def _value(variable: dict[str, Any], pod: Pod, secret: dict[str, Any]) -> str:
    if "value" in variable:
        return str(variable["value"])
    if "secretKeyRef" in variable["valueFrom"]:
        return str(secret["stringData"][variable["valueFrom"]["secretKeyRef"]["key"]])
    assert variable["valueFrom"]["fieldRef"]["fieldPath"].endswith("job-completion-index']")
    return str(pod.index)


def _kubeconfig(port: int) -> dict[str, Any]:
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": _NAMESPACE}}
    head = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [cluster], "contexts": [context]}
    return {**head, "users": [{"name": "u", "user": {"token": "t"}}]}


_PLACE = re.compile(
    rf"/(api/v1|apis/jobset\.x-k8s\.io/v1alpha2)/namespaces/{_NAMESPACE}/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?"
)


class _Handler(BaseHTTPRequestHandler):
    """The requests of `launch/kubernetes.py`, and no others."""

    cluster: Cluster

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _asked(self) -> tuple[str, str, str, dict[str, list[str]]]:
        parts = urlsplit(self.path)
        match = _PLACE.fullmatch(parts.path)
        kind, name, below = (match[2], match[3] or "", match[4] or "") if match else ("", "", "")
        return kind, name, below, parse_qs(parts.query)

    def do_POST(self) -> None:
        made = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, name, below, _ = self._asked()
        if below == "eviction":
            self.cluster.evict(name)
            self._answer(201, {"kind": "Status", "status": "Success"})
            return
        wrong, key = problems(made), (kind, made["metadata"]["name"])
        with self.cluster.lock:
            if wrong:
                self._refuse(422, f"{made['kind']} is invalid: {'; '.join(wrong)}")
            elif key in self.cluster.objects:
                self._refuse(409, f"{kind} {key[1]} already exists")
            elif kind not in ("jobsets", "configmaps", "secrets"):
                self._refuse(404, "the server could not find the requested resource")
            else:
                made["metadata"]["uid"] = uuid.uuid4().hex
                self.cluster.objects[key] = made
                self._answer(201, made)

    def do_GET(self) -> None:
        kind, name, below, query = self._asked()
        if below == "log":
            self._log(name, follow="true" in query.get("follow", [""])[0].lower())
            return
        with self.cluster.lock:
            if kind == "pods":
                wanted = dict(each.split("=") for each in query["labelSelector"][0].split(","))
                every = [pod.to_json() for pod in self.cluster.pods]
                listed = [pod for pod in every if wanted.items() <= pod["metadata"]["labels"].items()]
                self._answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": listed})
            elif (kind, name) in self.cluster.objects:
                self._answer(200, self.cluster.objects[kind, name])
            else:
                self._refuse(404, f"{kind} {name} not found")

    def do_DELETE(self) -> None:
        kind, name, _, _ = self._asked()
        with self.cluster.lock:
            found = self.cluster.objects.get((kind, name))
            if found is None:
                self._refuse(404, f"{kind} {name} not found")
                return
            found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            found["status"] = {}
            self._answer(200, found)

    def _log(self, name: str, *, follow: bool) -> None:
        pod = next(pod for pod in self.cluster.pods if pod.name == name)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        with open(pod.log, "rb") as log:
            while True:
                ended = pod.phase != "Running"
                self.wfile.write(log.read())
                if ended or not follow:
                    return
                time.sleep(_LOOK)
