"""The keys of `launch.kubernetes`: the objects that `ppctl submit --on kubernetes` asks a cluster for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppctl.config.metadata import MEMORY, Form, key, matching, positive

LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
"""A name of DNS (RFC 1123)."""
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_NAME = rf"([a-z0-9]([-a-z0-9.]{{0,251}}[a-z0-9])?/)?{_WORD}"
"""A qualified name: of a label, of a taint, of a resource."""


def _each(pattern: str) -> Callable[[Any], object]:
    read = matching(pattern)
    return lambda values: [read(each) for each in values]


_DNS_NAME = Form("small letters, digits and dashes, at most 63", matching(LABEL))
_CLAIM = Form("small letters, digits, dashes and dots", matching(rf"{LABEL}(\.{LABEL}){{0,3}}"))
_RESOURCE = Form("the name of a resource, as nvidia.com/gpu", matching(_NAME))
_RESOURCES = Form("a resource and its number, as rdma/hca=8", matching(rf"{_NAME}=[1-9][0-9]{{0,3}}"))
_LABELS = Form('labels, as ["team=speech","example.com/tier=1"]', _each(rf"{_NAME}=({_WORD})?"))
_TOLERATIONS = Form(
    'taints as kubectl writes them: ["nvidia.com/gpu:NoSchedule","pool=a:NoExecute"]',
    _each(rf"{_NAME}(=({_WORD})?)?:(NoSchedule|PreferNoSchedule|NoExecute)"),
)
_IMAGE = Form("the name of an image, as registry.example.com/ppctl:1.2", matching(r"[a-zA-Z0-9][\w./:@-]{0,500}"))
_MOUNT = Form("an absolute path of letters, digits and . _ -, as /runs", matching(r"(/(?!\.\.?(/|$))[\w.-]+)+"))


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """What the pods of a run are made of, and where they may run; only `ppctl submit --on kubernetes` reads it."""

    image: str | None = key(None, _IMAGE, jobs="kubernetes")
    """The image of the pods, which has ppctl and torch."""
    namespace: str | None = key(None, _DNS_NAME, jobs="kubernetes")
    """The namespace of all objects; none takes that of the kubeconfig's current context."""
    claim: str | None = key(None, _CLAIM, jobs="kubernetes")
    """The volume claim (ReadWriteMany) with the run directories: all pods write to it."""
    mount: str = key("/runs", _MOUNT, jobs="kubernetes")
    """Where the pods see that volume; the run's directory in them is MOUNT/NAME/ID."""
    queue: str | None = key(None, _DNS_NAME, jobs="kubernetes")
    """Kueue: the LocalQueue that admits the run; none: Kueue does not take part."""
    topology: str | None = key(None, _RESOURCE, jobs="kubernetes", needs="launch.kubernetes.queue")
    """Kueue: the label of nodes, such as a rack's or block's, that must be equal for all pods of the run."""
    node_selector: list[str] | None = key(None, _LABELS, jobs="kubernetes")
    """Labels that a node must have."""
    tolerations: list[str] | None = key(None, _TOLERATIONS, jobs="kubernetes")
    """Taints that keep the pods from no node."""
    labels: list[str] | None = key(None, _LABELS, jobs="kubernetes")
    """Further labels of all objects and pods."""
    gpu: str = key("nvidia.com/gpu", _RESOURCE, jobs="kubernetes", needs="launch.device=cuda")
    """The resource of which a pod gets one for each of its ranks (one in all with launch.share_gpu=true)."""
    rdma: str | None = key(None, _RESOURCES, jobs="kubernetes")
    """The network cards of a pod."""
    ipc_lock: bool = key(False, jobs="kubernetes")
    """Give the pods the capability IPC_LOCK: RDMA pins memory, and most clusters limit that without it."""
    cpus: int | None = key(None, positive(4096), jobs="kubernetes")
    """Cores that a pod asks for."""
    memory: str | None = key(None, MEMORY, jobs="kubernetes")
    """Memory of a pod's processes; its limit is this and `shm`. None: there is no limit."""
    shm: str = key("8GiB", MEMORY, jobs="kubernetes")
    """Size of /dev/shm, which is memory: NCCL, gloo and copies in memory (checkpoint.local) use it."""
    grace: int | None = key(None, positive(7 * 24 * 3600), jobs="kubernetes")
    """Seconds from the word that a pod must go to its end, in which the ranks save; none: two saves, three steps and a
    minute, as measured when the run has saved before, else as planned."""
