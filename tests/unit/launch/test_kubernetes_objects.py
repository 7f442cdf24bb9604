"""A run's objects in a cluster: an API server takes them, each key has its place, and text stays text."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_rules import IMMUTABLE, immutable_fields, lost_fields, problems
from jobset_crd import CHECKOUT, Crd

from ppctl.cli.main import main
from ppctl.config.mapping import from_mapping
from ppctl.launch import outcome
from ppctl.launch.kubernetes_objects import KubernetesJob
from ppctl.launch.planning import planned
from ppctl.launch.run_directory import Launch
from ppctl.plan import Plan

PODS = ("launch.kubernetes.image=registry.example.com/ppctl:1", "launch.kubernetes.claim=shared")
TWO = ("+recipe=quickstart", "nodes=2", "gpus_per_node=1", "launch.device=cuda", *PODS)
CPU = (*TWO, "launch.device=cpu")  # the last word about a key counts
FULL = (
    *TWO, "launch.kubernetes.namespace=team-a", "launch.kubernetes.queue=training",
    "launch.kubernetes.topology=cloud.example.com/rack", 'launch.kubernetes.node_selector=["pool=h100"]',
    'launch.kubernetes.tolerations=["nvidia.com/gpu:NoSchedule","pool=a:NoExecute"]',
    'launch.kubernetes.labels=["team=speech"]', "launch.kubernetes.rdma=rdma/hca=8", "launch.kubernetes.ipc_lock=true",
    "launch.kubernetes.cpus=32", "launch.kubernetes.memory=100GiB", "launch.kubernetes.shm=16GiB",
    "launch.kubernetes.mount=/data/runs", "launch.python=/opt/ppctl/bin/python", "launch.max_requeues=3",
    "launch.code=live", "launch.spares=2",
)  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The objects that a dry run prints."""
    assert main(["submit", "--on", "kubernetes", *words, "--dry-run"]) == 0, capsys.readouterr().err
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pod_of(jobset: dict[str, Any], part: int = 0) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][part]["template"]["spec"]["template"]


@pytest.mark.parametrize("words", [CPU, TWO, FULL], ids=["cpu", "gpu", "all keys"])
def test_an_api_server_takes_the_objects(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    made = printed(capsys, *words)
    assert [each["kind"] for each in made] == ["JobSet", "ConfigMap", "Secret"]
    assert [problem for each in made for problem in problems(each)] == []


BROKEN = {
    "spec.network.subdomains": "x",
    "spec.replicatedJobs.0.template.spec.template.spec.restartPolicy": "OnFailure",
    "spec.replicatedJobs.0.template.spec.template.spec.terminationGracePeriodSecond": 3,
    "spec.replicatedJobs.0.template.spec.parallelism": "2",
    "spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.onExitCodes.values": [4, 2],
    "spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.onExitCodes.containerName": "other",
    "spec.replicatedJobs.0.template.spec.successPolicy.rules.0.succeededIndexes": "2",
    "spec.successPolicy.targetReplicatedJobs": ["nodes"],
    "spec.failurePolicy.rules.0.name": "3rd",
    "spec.failurePolicy.rules.0.action": "Restart",
    "spec.failurePolicy.rules.0.onJobFailureReasons": ["Evicted"],
    "metadata.labels.app": "two words",
    "metadata.name": "ppctl-" + "a" * 50,
}  # fmt: skip


def broken(jobset: dict[str, Any], place: str) -> dict[str, Any]:
    *path, last = place.split(".")
    branch: Any = jobset
    for part in path:
        branch = branch[int(part)] if part.isdecimal() else branch[part]
    branch[last] = BROKEN[place]
    return jobset


@pytest.mark.parametrize("place", BROKEN)
def test_the_rules_see_what_an_api_server_refuses(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(broken(printed(capsys, *CPU)[0], place)) != []


@pytest.mark.parametrize(("version", "lost"), [("1.29", {"successPolicy"}), ("1.30", set()), ("1.31", set())])
def test_which_kubernetes_knows_all_fields(version: str, lost: set[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = [each for made in printed(capsys, *FULL) for each in lost_fields(made, version)]
    assert {word for each in said for word in re.findall(r"'(\w+)' was unexpected", each)} == lost
    assert len(said) == len(lost)


# Against JobSet's own CRD

with_crd = pytest.mark.skipif(CHECKOUT is None, reason="wants a checkout of JobSet: make test-jobset JOBSET=DIR")
NOT_THE_CRDS = {
    "spec.replicatedJobs.0.template.spec.template.spec.restartPolicy",
    "spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.onExitCodes.values",
    "spec.replicatedJobs.0.template.spec.podFailurePolicy.rules.0.onExitCodes.containerName",
    "spec.replicatedJobs.0.template.spec.successPolicy.rules.0.succeededIndexes",
    "spec.successPolicy.targetReplicatedJobs",
    "spec.failurePolicy.rules.0.name",
    "spec.failurePolicy.rules.0.onJobFailureReasons",
    "metadata.labels.app",
    "metadata.name",
}
"""What JobSet's webhook, a Job's validation and that of all objects' metadata refuse."""


@cache
def crd() -> Crd:
    return Crd(Path(str(CHECKOUT)))


@with_crd
@pytest.mark.parametrize("words", [CPU, TWO, FULL], ids=["cpu", "gpu", "all keys"])
def test_the_crd_takes_a_jobset_as_it_is(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert crd().problems(printed(capsys, *words)[0]) == []


@with_crd
@pytest.mark.parametrize("place", BROKEN)
def test_the_crd_refuses_what_the_rules_say_that_it_does(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bool(crd().problems(broken(printed(capsys, *CPU)[0], place))) == (place not in NOT_THE_CRDS)


@with_crd
def test_the_crd_has_no_rule_that_is_not_restated(capsys: pytest.CaptureFixture[str]) -> None:
    jobset = printed(capsys, *FULL)[0]
    assert not {"volumeClaimPolicies", "managedBy"} & jobset["spec"].keys()
    fast, others = {place for place, rule in crd().rules() if rule == "self == oldSelf"}, set[str]()
    for place, rule in crd().rules():
        others |= {place} if rule != "self == oldSelf" else set()
    without = {"spec.volumeClaimPolicies", "spec.replicatedJobs[].dependsOn"}  # what no JobSet of ppctl has
    assert fast - without == {f"spec.{name}" for name in IMMUTABLE if name != "replicatedJobs"}  # the webhook's
    assert others == {"spec", "spec.volumeClaimPolicies[]"}
    in_order = {"startupPolicy": {"startupPolicyOrder": "InOrder"}}
    depends = [{"name": "node", "status": "Ready"}]
    jobset["spec"] |= in_order
    assert crd().problems(jobset) == problems(jobset) == []
    jobset["spec"]["replicatedJobs"][1]["dependsOn"] = depends
    for said in (crd().problems(jobset), problems(jobset)):
        assert len(said) == 1 and "exclu" in said[0]


@with_crd
@pytest.mark.parametrize("field", IMMUTABLE)
def test_the_crd_holds_fast_what_the_rules_say(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = printed(capsys, *FULL)[0]
    before["spec"].setdefault("startupPolicy", {"startupPolicyOrder": "AnyOrder"})
    after = copy.deepcopy(before)
    after["spec"]["suspend"] = True
    assert crd().problems(after, before) == immutable_fields(before, after) == []
    changes: dict[str, Any] = {
        "failurePolicy": {"maxRestarts": 9}, "network": {"subdomain": "other"}, "successPolicy": {"operator": "Any"},
        "startupPolicy": {"startupPolicyOrder": "InOrder"}, "replicatedJobs": after["spec"]["replicatedJobs"][:1],
    }  # fmt: skip
    after["spec"][field] = changes[field]
    assert immutable_fields(before, after) == [field]
    assert crd().problems(after, before) == [f"spec.{field}: Value is immutable"] * (field != "replicatedJobs")


def test_each_key_is_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    jobset, files, secret = printed(capsys, *FULL)
    template = pod_of(jobset)
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert {each["metadata"]["namespace"] for each in (jobset, files, secret)} == {"team-a"}
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert template["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-required-topology": "cloud.example.com/rack"}
    assert template["metadata"]["labels"]["team"] == "speech"
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "pool", "operator": "Equal", "value": "a", "effect": "NoExecute"},
    ]
    memory = str((100 + 16) * 2**30)  # /dev/shm is memory of the pod's own
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1", "rdma/hca": "8", "memory": memory}
    assert container["resources"]["requests"] == {**container["resources"]["limits"], "cpu": "32"}
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(16 * 2**30)}} in pod["volumes"]
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["command"] == ["/opt/ppctl/bin/python", "-m", "ppctl.launch.pod"]
    run = f"/data/runs/quickstart/{jobset['metadata']['name'].removeprefix('ppctl-')}"
    assert container["args"] == [run, "--code", "live", "--files", "/etc/ppctl", "--first", "0"]
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"], job["backoffLimitPerIndex"]) == (2, 2, 6, 3)


def test_spares_are_a_job_of_their_own_with_which_the_jobset_neither_fails_nor_waits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their pods are those of nodes; their numbers follow theirs."""
    spec = printed(capsys, *FULL)[0]["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["node"]}
    node, spare = spec["replicatedJobs"]
    assert (node["name"], spare["name"]) == ("node", "spare")
    nodes, spares = node["template"]["spec"], spare["template"]["spec"]
    assert nodes["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}  # another index may have no machine
    assert (spares["completions"], spares["parallelism"], spares["backoffLimit"]) == (2, 2, 2**31 - 1)
    assert not {"successPolicy", "backoffLimitPerIndex", "maxFailedIndexes"} & spares.keys()
    assert {rule["action"] for rule in spares["podFailurePolicy"]["rules"]} == {"Ignore"}
    first, second = copy.deepcopy((pod_of({"spec": spec}), pod_of({"spec": spec}, 1)))
    assert [pod["spec"]["containers"][0]["args"].pop() for pod in (first, second)] == ["0", "2"]
    assert first == second
    every = {"name": "PET_NNODES", "value": "4"}
    assert every in second["spec"]["containers"][0]["env"]
    assert len(printed(capsys, *CPU)[0]["spec"]["replicatedJobs"]) == 1


def test_what_each_end_of_a_pod_means(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a node's. A spare that fails is made again, however often."""
    rules = printed(capsys, *CPU)[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())}
    assert by_code == {
        **{code: "FailJob" for code in (1, *outcome.FINAL)}, outcome.TERMINATED: "Ignore", outcome.GO_ON: "FailIndex"
    }  # fmt: skip
    assert {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]} in rules


def test_the_files_are_the_config_and_the_plan_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    jobset, files, secret = printed(capsys, *CPU)
    config = from_mapping(yaml.safe_load(files["data"]["config.yaml"]))
    assert (config.launch.target, config.log.dir) == ("kubernetes", "/runs")
    plan = Plan.from_json(json.loads(gzip.decompress(base64.b64decode(files["binaryData"]["plan.json.gz"]))))
    assert plan.digest == planned([*CPU])[1].digest
    word = secret["stringData"]["secret"]
    assert len(word) == 64 and word not in json.dumps([jobset, files])
    again = printed(capsys, *CPU)
    assert again[2]["stringData"]["secret"] != word
    assert again[0]["metadata"]["name"] != jobset["metadata"]["name"], "what is applied by hand is a run of its own"


def test_no_text_becomes_a_variable_or_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "$(PPCTL_SECRET): {a: b} # '\""
    jobset = printed(capsys, *CPU, f"log.name={json.dumps(odd)}")[0]
    (container,) = pod_of(jobset)["spec"]["containers"]
    run = f"/runs/{odd}/{jobset['metadata']['name'].removeprefix('ppctl-')}"
    assert container["args"][0] == run.replace("$", "$$")
    assert problems(jobset) == []


def test_the_grace_follows_from_the_save(capsys: pytest.CaptureFixture[str]) -> None:
    composed, plan, _ = planned([*CPU])
    launch = Launch(composed.config, plan, "")
    job, measured = (
        KubernetesJob(launch, "1", "live"),
        KubernetesJob(launch, "1", "live", [{"step": 1, "save_s": 100.0}]),
    )
    assert 60 + 10 < job.grace < 60 + 10 + 5  # a tiny model's
    assert measured.grace == job.grace + 2 * 100
    composed.config.launch.kubernetes.grace = 30
    assert measured.grace == 30


def test_an_update_may_not_change_what_the_crd_holds_fast(capsys: pytest.CaptureFixture[str]) -> None:
    before = printed(capsys, *CPU)[0]
    after = copy.deepcopy(before)
    after["spec"]["suspend"] = True
    assert immutable_fields(before, after) == []
    after["spec"]["failurePolicy"]["maxRestarts"] = 1
    assert immutable_fields(before, after) == ["failurePolicy"]


REFUSED = {
    "launch.kubernetes.image=null": "PP-E662",
    "launch.kubernetes.claim=null": "PP-E662",
    "launch.kubernetes.image='a b'": "PP-E103",
    "launch.kubernetes.namespace=Team_A": "PP-E103",
    "launch.kubernetes.mount=/a/../b": "PP-E103",
    "launch.kubernetes.mount=/a:b": "PP-E103",
    'launch.kubernetes.labels=["a b=c"]': "PP-E103",
    'launch.kubernetes.labels=["a"]': "PP-E103",
    'launch.kubernetes.tolerations=["a:Never"]': "PP-E103",
    "launch.kubernetes.rdma=rdma/hca": "PP-E103",
    "launch.kubernetes.topology=rack": "PP-E103",
    "launch.kubernetes.shm=much": "PP-E103",
    "launch.kubernetes.grace=0": "PP-E103",
    "launch.partition=gpu": "PP-E629",
    "launch.device=any": "PP-E629",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_pods_cannot_be_made_of_is_refused_by_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--on", "kubernetes", *CPU, word, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert REFUSED[word] in said and word.partition("=")[0].rpartition(".")[2] in said


@pytest.mark.parametrize("command", [["train"], ["submit", "--dry-run"]], ids=["train", "submit to SLURM"])
def test_elsewhere_the_keys_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command[0], *CPU, *command[1:]]) == 2
    said = capsys.readouterr().err
    assert "PP-E629: launch.kubernetes.image, launch.kubernetes.claim take effect in" in said
    assert "--on kubernetes" in said
