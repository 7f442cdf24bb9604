"""What an API server says of ppctl's objects: the schemas of its fields, and the rules beyond them.

Fields, types and what must be there: Kubernetes' own OpenAPI document of a version as JSON schemas (package
`kubernetes-validate`), and for the JobSet around a Job's template the model that Kubeflow generates from JobSet's
(`kubeflow_trainer_api`). A field that they do not know gets lost.
Rules: those that the JobSet's CRD states in CEL and its webhook checks, and those of a Job's validation, in our words.
With a checkout of JobSet the tests hold them against the CRD itself (`jobset_crd`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
from kubernetes_validate import ValidationError, latest_version, validate

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
KEY = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?")
REASONS = {"BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"}
IMMUTABLE = ("failurePolicy", "network", "successPolicy", "startupPolicy", "replicatedJobs")
"""Of a JobSet's spec: `self == oldSelf` in CEL, or the webhook's."""


def problems(made: dict[str, Any]) -> list[str]:
    """All that an API server would refuse `made` for."""
    rules = _RULES.get(made["kind"], lambda made: ())
    return [*lost_fields(made, latest_version()), *_metadata(made["metadata"]), *rules(made)]


def immutable_fields(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The fields of a JobSet that an update may not change, and does."""
    return [name for name in IMMUTABLE if before["spec"].get(name) != after["spec"].get(name)]


def lost_fields(made: dict[str, Any], version: str) -> list[str]:
    """What Kubernetes' schemas of a version, such as 1.31, refuse `made` for: a JobSet is known by its Jobs."""
    if made["kind"] == "JobSet":
        jobs = [
            {"apiVersion": "batch/v1", "kind": "Job", **each["template"]} for each in made["spec"]["replicatedJobs"]
        ]
        return [lost for job in jobs for lost in lost_fields(job, version)]
    try:
        validate(made, version, strict=True)
    except ValidationError as error:
        return [f"{error.json_path}: {error.message}"]
    return []


def _lost_around_jobs(made: dict[str, Any]) -> list[str]:
    try:
        return [*_differences(made, JobsetV1alpha2JobSet.from_dict(made).to_dict(), "JobSet")]
    except ValueError as error:
        return [str(error)]


def _differences(made: Any, known: Any, where: str) -> Iterator[str]:
    if isinstance(made, dict) and isinstance(known, dict):
        for name, value in made.items():
            yield from _differences(value, known.get(name), f"{where}.{name}")
    elif isinstance(made, list) and isinstance(known, list) and len(made) == len(known):
        for number, (one, other) in enumerate(zip(made, known, strict=True)):
            yield from _differences(one, other, f"{where}[{number}]")
    elif made != known or type(made) is not type(known):
        yield f"{where}: {made!r} is {known!r} to the API"


def _metadata(metadata: dict[str, Any]) -> Iterator[str]:
    if not LABEL.fullmatch(metadata["name"]):
        yield f"{metadata['name']} is no DNS label"
    for name, value in metadata.get("labels", {}).items():
        if not (KEY.fullmatch(name) and VALUE.fullmatch(value)):
            yield f"label {name}={value}"
    for name in metadata.get("annotations", {}):
        if not KEY.fullmatch(name):
            yield f"annotation {name}"


def _of_a_jobset(made: dict[str, Any]) -> Iterator[str]:
    yield from _lost_around_jobs(made)
    name, spec = made["metadata"]["name"], made["spec"]
    if spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder" and any(
        "dependsOn" in each for each in spec["replicatedJobs"]
    ):
        yield "startupPolicy and dependsOn exclude each other"
    if not LABEL.fullmatch(spec["network"]["subdomain"]):
        yield "the subdomain is the name of a service"
    names = [each["name"] for each in spec["replicatedJobs"]]
    yield from _of_failures(spec["failurePolicy"]["rules"], names)
    success = spec.get("successPolicy", {"operator": "All"})
    if success["operator"] not in ("All", "Any") or not set(success.get("targetReplicatedJobs", ())) <= set(names):
        yield "the success policy names an operator and replicated jobs"
    for each in spec["replicatedJobs"]:
        job = each["template"]["spec"]
        last = f"{name}-{each['name']}-{each['replicas'] - 1}-{job['completions'] - 1}-abcde"
        if not LABEL.fullmatch(last):
            yield f"a pod's name {last}"
        yield from _of_a_job(job)


def _of_failures(rules: list[dict[str, Any]], names: list[str]) -> Iterator[str]:
    if len({rule["name"] for rule in rules}) < len(rules):
        yield "names of rules are unique"
    for rule in rules:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) or len(rule["name"]) > 128:
            yield f"the name of rule {rule['name']}"
        if rule["action"] not in ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"):
            yield f"action {rule['action']}"
        if not set(rule.get("onJobFailureReasons", ())) <= REASONS:
            yield f"reasons {rule['onJobFailureReasons']}"
        if not set(rule.get("targetReplicatedJobs", ())) <= set(names):
            yield "a rule's target is a replicated job"


def _of_a_job(job: dict[str, Any]) -> Iterator[str]:
    pod = job["template"]["spec"]
    if job.get("podFailurePolicy") and (pod["restartPolicy"] != "Never" or job.get("podReplacementPolicy") != "Failed"):
        yield "podFailurePolicy needs restartPolicy Never and podReplacementPolicy Failed"
    indexed = job.get("completionMode") == "Indexed"
    if "backoffLimitPerIndex" in job and not indexed:
        yield "backoffLimitPerIndex needs Indexed"
    if job.get("maxFailedIndexes", 0) > job["completions"] or (
        "maxFailedIndexes" in job and "backoffLimitPerIndex" not in job
    ):
        yield "maxFailedIndexes needs backoffLimitPerIndex, and is at most completions"
    yield from _of_success(job.get("successPolicy", {"rules": ()})["rules"], job["completions"] if indexed else 0)
    containers = {each["name"] for each in pod["containers"]}
    for rule in job.get("podFailurePolicy", {}).get("rules", ()):
        if len({"onExitCodes", "onPodConditions"} & rule.keys()) != 1:
            yield "a rule is about exit codes or about conditions"
        if rule["action"] == "FailIndex" and "backoffLimitPerIndex" not in job:
            yield "FailIndex needs backoffLimitPerIndex"
        codes = rule.get("onExitCodes", {"values": [1], "operator": "In", "containerName": next(iter(containers))})
        values = codes["values"]
        if values != sorted(set(values)) or not all(0 <= value <= 255 for value in values) or 0 in values:
            yield f"exit codes {values} are in order, and with In not 0"
        if codes["containerName"] not in containers:
            yield "a rule names a container"
    yield from _of_a_pod(pod)


def _of_success(rules: Iterable[dict[str, Any]], completions: int) -> Iterator[str]:
    for rule in rules:
        indexes = re.fullmatch(r"([0-9]+)(-[0-9]+)?", rule.get("succeededIndexes", "0"))
        if not rule or indexes is None or int(indexes[1]) >= completions:
            yield "a success policy needs Indexed, and indexes or a count"


def _of_a_pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {each["name"] for each in pod["volumes"]}
    for container in pod["containers"]:
        for mount in container["volumeMounts"]:
            if mount["name"] not in volumes or ":" in mount["mountPath"] or not mount["mountPath"].startswith("/"):
                yield f"mount {mount}"
        for variable in container["env"]:
            if ("value" in variable) == ("valueFrom" in variable):
                yield f"variable {variable}"
        yield from _of_resources(container.get("resources", {"limits": {}, "requests": {}}))
    for taint in pod.get("tolerations", ()):
        if taint["operator"] == "Exists" and "value" in taint:
            yield f"toleration {taint}"


def _of_resources(resources: dict[str, dict[str, str]]) -> Iterator[str]:
    for name, amount in [*resources["limits"].items(), *resources["requests"].items()]:
        if not KEY.fullmatch(name) or not QUANTITY.fullmatch(amount):
            yield f"resource {name}: {amount}"
    for name, amount in resources["limits"].items():
        if "/" in name and resources["requests"].get(name, amount) != amount:
            yield f"{name}: an extended resource is asked for as it is limited"


def _of_a_config_map(made: dict[str, Any]) -> Iterator[str]:
    if len(json.dumps(made)) > 2**20 or made["data"].keys() & made["binaryData"].keys():
        yield "a ConfigMap has at most a MiB, and a key once"


_RULES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {"JobSet": _of_a_jobset, "ConfigMap": _of_a_config_map}
