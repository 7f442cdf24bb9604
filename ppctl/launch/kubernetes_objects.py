"""The objects of a run in a Kubernetes cluster, as plain data: a JobSet, a ConfigMap and a Secret.

    JobSet      an Indexed job `node` with a pod for each node, all at once, each of which runs `ppctl.launch.pod`; and
                a job `spare` of pods that stand by. The JobSet succeeds and fails as `node` does
    ConfigMap   config.yaml, the plan and the command line, from which pod 0 makes the run directory on the volume
    Secret      the run's secret, by which its ranks know each other

No typed text is part of a shell's line or of YAML text: it is always one string in this data.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ppctl.config.mapping import to_mapping
from ppctl.config.quantities import memory_bytes
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem
from ppctl.hang.progress import time_to_leave
from ppctl.host.devices import gpus_needed, machines
from ppctl.launch.outcome import GO_ON, TERMINATED
from ppctl.launch.run_directory import Launch, with_value
from ppctl.runs.run_starts import SECRET

KIND: dict[str, Any] = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}
API = "jobset.x-k8s.io/v1alpha2"
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
FIRST_POD = f"jobset.sigs.k8s.io/replicatedjob-name=node,{INDEX_LABEL}=0"
_FILES = "/etc/ppctl"


@dataclass(frozen=True, slots=True)
class KubernetesJob:
    """The values that the objects are made from."""

    launch: Launch
    run_id: str
    code: str
    """The package's digest, or `live`."""
    records: Sequence[Mapping[str, Any]] = ()
    """The records of metrics.jsonl so far."""

    @property
    def config(self) -> RunConfig:
        """The config as the pods read it: log.dir is the volume's mount."""
        return with_value(self.launch.config, "log", dir=self.launch.config.launch.kubernetes.mount)

    @property
    def grace(self) -> int:
        """Seconds that a pod has to save."""
        needed = time_to_leave(self.launch.plan, self.records)
        return self.config.launch.kubernetes.grace or int(needed) + 11


def _name(job: KubernetesJob) -> str:
    return f"ppctl-{re.sub('[^a-z0-9]+', '-', job.run_id.lower()).strip('-')[:40]}"


def _run(job: KubernetesJob) -> str:
    return f"{job.config.log.dir}/{job.config.log.name}/{job.run_id}"


def _machines(job: KubernetesJob) -> tuple[int, int]:
    return machines(job.config.launch.nodes, job.config.launch.gpus_per_node, job.launch.plan.sizes.world)


def _labels(job: KubernetesJob) -> dict[str, str]:
    return _pairs(job.config.launch.kubernetes.labels) | {"app.kubernetes.io/managed-by": "ppctl"}


def _metadata(job: KubernetesJob, **more: Any) -> dict[str, Any]:
    namespace = job.config.launch.kubernetes.namespace
    return {"name": _name(job), **({"namespace": namespace} if namespace else {}), "labels": _labels(job), **more}


def lacking(config: RunConfig) -> Iterator[Problem]:
    """The problems of a config that lacks settings that pods need."""
    for name, example in (("image", "registry.example.com/ppctl:1"), ("claim", "runs")):
        if getattr(config.launch.kubernetes, name) is None:
            key = f"launch.kubernetes.{name}"
            yield Problem("PP-E662", f"pods need {key}", f"{key}={example}", f"{key} = null")


def objects(job: KubernetesJob, secret: str) -> list[dict[str, Any]]:
    """The JobSet, the ConfigMap and the Secret."""
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(job), "type": "Opaque", "immutable": True}
    return [_jobset(job), _config_map(job), {**kind, "stringData": {"secret": secret}}]


def _jobset(job: KubernetesJob) -> dict[str, Any]:
    settings, limit = job.config.launch.kubernetes, min(job.config.launch.max_requeues, 10_000)
    metadata = _metadata(job, annotations={"ppctl/run": _run(job)})
    if settings.queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = settings.queue
    # A job that fails by a rule of its pods stays failed. The JobSet restarts if pods or the rendezvous are gone.
    settled = {"name": "settled", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    jobs = [("node", _nodes(job, limit)), *[("spare", _spares(job))] * bool(job.config.launch.spares)]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": _name(job)},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["node"]},
        "failurePolicy": {"maxRestarts": limit, "rules": [settled]},
        "replicatedJobs": [{"name": name, "replicas": 1, "template": {"spec": each}} for name, each in jobs],
    }
    return {"apiVersion": API, "kind": "JobSet", "metadata": metadata, "spec": spec}


def _nodes(job: KubernetesJob, limit: int) -> dict[str, Any]:
    nodes = _machines(job)[0]
    settled = _on_exit("FailJob", 1, 2, 3, 4)  # decisions of ppctl, which another pod would repeat
    return {
        **_indexed(job, nodes, 0, [settled, *_IGNORED, _on_exit("FailIndex", GO_ON)]),
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},  # a spare may have taken the place of another pod
        "backoffLimit": nodes * limit,
        "backoffLimitPerIndex": limit,
        "maxFailedIndexes": 0,
    }


def _spares(job: KubernetesJob) -> dict[str, Any]:
    """The Job of the spare pods. It never fails, since the JobSet would fail with it."""
    return _indexed(job, job.config.launch.spares, _machines(job)[0], _IGNORED) | {"backoffLimit": 2**31 - 1}


def _indexed(job: KubernetesJob, pods: int, first: int, rules: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The spec of a Job of `pods` pods; `first` is the number of the run's nodes before them."""
    metadata: dict[str, Any] = {"labels": _labels(job)}
    if job.config.launch.kubernetes.topology:
        metadata["annotations"] = {"kueue.x-k8s.io/podset-required-topology": job.config.launch.kubernetes.topology}
    return {
        "completionMode": "Indexed",
        "completions": pods,
        "parallelism": pods,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [*rules]},
        "template": {"metadata": metadata, "spec": _pod_spec(job, first)},
    }


def _on_exit(action: str, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": "ppctl", "operator": "In", "values": list(codes)}}


_IGNORED = (
    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    _on_exit("Ignore", TERMINATED),  # it was asked to end, and has saved
)


def _pod_spec(job: KubernetesJob, first: int) -> dict[str, Any]:
    settings = job.config.launch.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "containers": [_container(job, first)],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": settings.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(memory_bytes(settings.shm))}},
            {"name": "files", "configMap": {"name": _name(job)}},
        ],
    }
    if settings.node_selector:
        spec["nodeSelector"] = _pairs(settings.node_selector)
    if settings.tolerations:
        spec["tolerations"] = [_toleration(taint) for taint in settings.tolerations]
    return spec


def _container(job: KubernetesJob, first: int) -> dict[str, Any]:
    launch, settings = job.config.launch, job.config.launch.kubernetes
    container: dict[str, Any] = {
        "name": "ppctl",
        "image": settings.image,
        "command": [_literal(launch.python or "python3"), "-m", "ppctl.launch.pod"],
        "args": [_literal(_run(job)), "--code", job.code, "--files", _FILES, "--first", str(first)],
        "env": list(_environment(job)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "runs", "mountPath": settings.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "files", "mountPath": _FILES, "readOnly": True},
        ],
    }
    limits, requests = dict(_limits(job)), {"cpu": str(settings.cpus)} if settings.cpus else {}
    if limits or requests:
        container["resources"] = {"limits": limits, "requests": {**limits, **requests}}
    if settings.ipc_lock:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return container


def _literal(text: str) -> str:
    return text.replace("$", "$$")  # else the cluster replaces $(NAME)


def _limits(job: KubernetesJob) -> Iterator[tuple[str, str]]:
    launch, settings = job.config.launch, job.config.launch.kubernetes
    if launch.device == "cuda":
        yield settings.gpu, str(gpus_needed(_machines(job)[1], share=launch.share_gpu))
    if settings.rdma:
        yield from _pairs([settings.rdma]).items()
    if settings.memory:  # /dev/shm counts as the pod's memory
        yield "memory", str(memory_bytes(settings.memory) + memory_bytes(settings.shm))


def _environment(job: KubernetesJob) -> Iterator[dict[str, Any]]:
    """Yield the variables that tell a pod's agent its place, as in Kubeflow's TrainJob, and the run's secret."""
    values = {
        "PET_NNODES": _machines(job)[0] + job.config.launch.spares,
        "PET_MASTER_ADDR": f"{_name(job)}-node-0-0.{_name(job)}",
        "PET_MASTER_PORT": 29500,
    }
    yield from ({"name": name, "value": str(value)} for name, value in values.items())
    index = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX_LABEL}']"}}
    yield {"name": "PET_NODE_RANK", "valueFrom": index}
    yield {"name": SECRET, "valueFrom": {"secretKeyRef": {"name": _name(job), "key": "secret"}}}


def _toleration(taint: str) -> dict[str, str]:
    which, _, effect = taint.rpartition(":")
    name, _, value = which.partition("=")
    same = {"operator": "Equal", "value": value} if value else {"operator": "Exists"}
    return {"key": name, **same, "effect": effect}


def _pairs(listed: Sequence[str] | None) -> dict[str, str]:
    return dict(each.split("=", 1) for each in listed or ())


def _config_map(job: KubernetesJob) -> dict[str, Any]:
    config = yaml.safe_dump(to_mapping(job.config), sort_keys=False, allow_unicode=True)
    plan = base64.b64encode(gzip.compress(json.dumps(job.launch.plan.to_json()).encode(), mtime=0)).decode()
    data = {"config.yaml": config, "command.txt": job.launch.command}
    kind = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(job), "immutable": True}
    return {**kind, "data": data, "binaryData": {"plan.json.gz": plan}}


def as_yaml(listed: Sequence[Mapping[str, Any]]) -> str:
    """The objects as YAML documents for kubectl."""
    return yaml.safe_dump_all(listed, sort_keys=False, allow_unicode=True, explicit_start=True, width=120)
