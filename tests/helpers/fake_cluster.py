"""The tests' own Kubernetes: an API server for the official client, the controllers of JobSet and Job, and a kubelet.

A pod is the process tree of its container's command, with the manifest's variables. What a machine would give it is
made up: its host name, the ConfigMap's files in a directory of their own, and the rendezvous' name and port, which are
this machine's. Objects are refused as `cluster_rules` says, and its API server is `fake_api`.
"""

from __future__ import annotations

import base64
import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cluster_rules import immutable_fields
from command import environment, free_port
from fake_api import Handler, kubeconfig

_LOOK = 0.05


@dataclass
class Pod:
    """One pod and its process."""

    name: str
    uid: str
    index: int
    part: str
    """The replicated job: `node` or `spare`."""
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
            "jobset.sigs.k8s.io/replicatedjob-name": self.part,
            "batch.kubernetes.io/job-completion-index": str(self.index),
        }
        unmet = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": self.why}]
        began = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self.created)) + f".{int(self.created % 1 * 1e6):06}Z"
        return {
            "metadata": {"name": self.name, "uid": self.uid, "labels": labels, "creationTimestamp": began},
            "spec": {
                "containers": self.spec["containers"],
                **({} if self.why else {"nodeName": f"machine-{self.part}-{self.index}"}),
            },
            "status": {"phase": self.phase, **({"conditions": unmet} if self.why else {})},
        }


class Cluster:
    """A cluster of this machine; `unschedulable` are the nodes' indexes that no machine has room for."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home, self.variables = home, variables
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.gone: list[Pod] = []
        """Pods that were replaced or deleted, with their ends."""
        self.failures: dict[tuple[str, int], int] = {}
        self.unschedulable: set[int] = set()
        self.lock = threading.RLock()
        self._port = _quiet_port()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (Handler,), {"cluster": self}))
        self._over = threading.Event()
        self.kubeconfig = home / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(kubeconfig(self._server.server_port)))

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

    def running(self, index: int, part: str = "node") -> Pod | None:
        """The pod of an index that runs."""
        with self.lock:
            own = (pod for pod in self.pods if (pod.part, pod.index, pod.phase) == (part, index, "Running"))
            return next(own, None)

    def kill(self, index: int, part: str = "node") -> None:
        """Lose the machine of a pod: all its processes are gone at once."""
        pod = self.running(index, part)
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

    def change_context(self) -> None:
        """Have the kubeconfig's current context lead elsewhere."""
        known = json.loads(self.kubeconfig.read_text())
        known["clusters"].append({"name": "d", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}})
        known["contexts"].append({"name": "y", "context": {"cluster": "d", "user": "u"}})
        self.kubeconfig.write_text(json.dumps(known | {"current-context": "y"}))

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

    def ends_of(self, index: int, part: str = "node") -> list[int | None]:
        """The exit codes of the pods of an index that are no more."""
        return [pod.code for pod in self.gone if (pod.part, pod.index) == (part, index)]

    def ranks(self, index: int, part: str = "node") -> dict[int, int]:
        """The processes of a pod's ranks: whose stderr is a rank's log has become that rank."""
        pod, found = self.running(index, part), dict[int, int]()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if pod is not None and _mark(pod) in (process / "environ").read_bytes().split(b"\0"):
                    log = re.search(r"/rank-(\d+)\.log", os.readlink(process / "fd/2"))
                    found |= {int(log[1]): int(process.name)} if log else {}
        return found

    # Controllers

    def _reconcile(self) -> None:
        while not self._over.wait(_LOOK):
            with self.lock:
                for kind, name in list(self.objects):
                    if kind == "jobsets":
                        self._jobset(name, self.objects[kind, name])

    def _jobset(self, name: str, jobset: dict[str, Any]) -> None:
        own = [pod for pod in self.pods if pod.jobset == name]
        for pod in own:
            self._look_at(pod)
        if self.condition(name):
            return
        if "deletionTimestamp" in jobset["metadata"] or jobset["spec"].get("suspend"):
            self._empty(name, own, deleted="deletionTimestamp" in jobset["metadata"])
            return
        parts, complete = jobset["spec"]["replicatedJobs"], set[str]()
        for part in parts:
            state = self._job(name, jobset, part)
            if state is None:
                return
            complete |= {part["name"]} if state else set()
        policy = jobset["spec"].get("successPolicy", {"operator": "All"})
        assert policy["operator"] == "All"
        if set(policy.get("targetReplicatedJobs") or [part["name"] for part in parts]) <= complete:
            self._conclude(jobset, "Completed", "AllJobsCompleted")

    def _job(self, name: str, jobset: dict[str, Any], part: dict[str, Any]) -> bool | None:
        """Follow the rules of one Job; returns whether it is complete, None if it has failed."""
        job = part["template"]["spec"]
        own = [pod for pod in self.pods if (pod.jobset, pod.part) == (name, part["name"])]
        succeeded, every = {pod.index for pod in own if pod.phase == "Succeeded"}, set(range(job["completions"]))
        enough = [{int(rule["succeededIndexes"])} for rule in job.get("successPolicy", {}).get("rules", ())]
        if any(wanted <= succeeded for wanted in [every, *enough]):
            for pod in own:
                self._end(pod)  # what its success policy makes superfluous
            return not any(pod.phase == "Running" for pod in own)
        if not all(self._failed(pod, jobset, job) for pod in own if pod.phase == "Failed"):
            return None
        own = [pod for pod in self.pods if (pod.jobset, pod.part) == (name, part["name"])]
        for index in every - {pod.index for pod in own}:
            own.append(self._new(name, part["name"], index, job["template"]["spec"]))
            self.pods.append(own[-1])
        for pod in own:
            if pod.phase == "Pending":
                self._start(pod)
        return False

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
            self.failures[pod.part, pod.index] = self.failures.get((pod.part, pod.index), 0) + 1
        failed = sum(count for (part, _), count in self.failures.items() if part == pod.part)
        of_index = self.failures.get((pod.part, pod.index), 0)
        per_index = job.get("backoffLimitPerIndex", job["backoffLimit"])
        if action == "FailIndex" or of_index > per_index or failed > job["backoffLimit"]:
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

    def _new(self, job: str, part: str, index: int, spec: dict[str, Any]) -> Pod:
        uid = uuid.uuid4().hex
        name = f"{job}-{part}-0-{index}-{uid[:5]}"
        return Pod(name, uid, index, part, job, spec, self.home / f"{name}.log")

    def _start(self, pod: Pod) -> None:
        full = pod.part == "node" and pod.index in self.unschedulable
        pod.why = "0/2 nodes are available: insufficient nvidia.com/gpu" if full else ""
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
        made_up = {"SLURMD_NODENAME": pod.name.rpartition("-")[0], "POD_UID": pod.uid}  # a host's name is its index's
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
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if _mark(pod) in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)


def _quiet_port() -> int:
    """A free port below those that the kernel gives: before pod 0 listens there, no other process does."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError("no port is free")


def _mark(pod: Pod) -> bytes:
    return f"POD_UID={pod.uid}".encode()


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
