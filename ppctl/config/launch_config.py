"""The keys of `launch`, `launch.kubernetes` and `log`: where ranks are, what starts them, and where they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ppctl.config.metadata import (
    DIRECTORY_NAME,
    LATER,
    MEMORY,
    MOST_RANKS,
    NOT_EMPTY,
    ONE_LINE,
    RESERVE,
    SLURM_TIME,
    STEPS,
    TIME,
    Form,
    Support,
    key,
    matching,
    not_negative,
    one_of,
    positive,
)

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
    """The pods of a run, and the nodes that they may run on; only `ppctl submit --on kubernetes` reads it."""

    image: str | None = key(None, _IMAGE, jobs="kubernetes")
    """The image of the pods, which has ppctl and torch."""
    namespace: str | None = key(None, _DNS_NAME, jobs="kubernetes")
    """The namespace of all objects; none takes the namespace of the kubeconfig's current context."""
    claim: str | None = key(None, _CLAIM, jobs="kubernetes")
    """The volume claim (ReadWriteMany) with the run directories: all pods write to it."""
    mount: str = key("/runs", _MOUNT, jobs="kubernetes")
    """Where the pods see the volume of `claim`; the run's directory in them is MOUNT/NAME/ID."""
    queue: str | None = key(None, _DNS_NAME, jobs="kubernetes")
    """Kueue: the LocalQueue that admits the run; none: Kueue does not take part."""
    topology: str | None = key(None, _RESOURCE, jobs="kubernetes", needs="launch.kubernetes.queue")
    """Kueue: the label of nodes, such as a rack's or block's, that must be equal for all pods of the run."""
    node_selector: list[str] | None = key(None, _LABELS, jobs="kubernetes")
    """Labels that a node must have."""
    tolerations: list[str] | None = key(None, _TOLERATIONS, jobs="kubernetes")
    """Taints of nodes on which the pods may run all the same."""
    labels: list[str] | None = key(None, _LABELS, jobs="kubernetes")
    """Further labels of all objects and pods."""
    gpu: str = key("nvidia.com/gpu", _RESOURCE, jobs="kubernetes", needs="launch.device=cuda")
    """The resource that a pod asks for: one for each of its ranks, or with launch.share_gpu=true one in all."""
    rdma: str | None = key(None, _RESOURCES, jobs="kubernetes")
    """The network cards of a pod."""
    ipc_lock: bool = key(False, jobs="kubernetes")
    """Give the pods the capability IPC_LOCK: RDMA pins memory, and most clusters limit that without it."""
    cpus: int | None = key(None, positive(4096), jobs="kubernetes")
    """Cores that a pod asks for."""
    memory: str | None = key(None, MEMORY, jobs="kubernetes")
    """Memory of a pod's processes; the pod's limit is the sum of this and `shm`. None: there is no limit."""
    shm: str = key("8GiB", MEMORY, jobs="kubernetes")
    """Size of /dev/shm, which is memory: NCCL, gloo and copies in memory (checkpoint.local) use it."""
    grace: int | None = key(None, positive(7 * 24 * 3600), jobs="kubernetes")
    """Seconds that a pod has to end when it is asked to, in which its ranks save; none: two saves, three steps and
    70 s, with measured times if the run has saved before, else with planned ones."""


_PYXIS = Support(note="needs pyxis and enroot on the nodes; with these it was not run yet")
_CONTAINER = "launch.container_image"


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """Where the ranks run."""

    target: str = key("local", one_of("local", "slurm", "kubernetes", "env"))
    """What starts the ranks: `local`, `slurm`, `kubernetes` or `env` (ranks that ppctl does not start)."""
    device: str = key("cuda", one_of("cuda", "cpu", "any"))
    """What the ranks compute on: `cuda`, `cpu`, or `any` (cuda if there are enough GPUs)."""
    nodes: int | None = key(None, positive(MOST_RANKS), names="nodes", known_as="--nnodes", options="-N --nodes")
    """Machines; none means as many as the layout needs (one, where the run is local)."""
    gpus_per_node: int | None = key(
        None,
        positive(MOST_RANKS),
        names="gpus_per_node",
        known_as="--nproc-per-node",
        options="-n --ntasks --ntasks-per-node --gpus-per-node",
    )
    """Ranks on each machine; none means as many as the layout needs."""
    device_memory: str | None = key(None, MEMORY)
    """Memory of one device, as "80GiB"; none means that the plan is not compared with a limit."""
    memory_reserve: str = key("auto", RESERVE)
    """The part of device_memory that CUDA's context and communicators take, as "2GiB"; a plan's peak must fit the rest.
    `auto` follows from the sizes of the groups; it is 0 on the CPU."""
    share_gpu: bool = key(False, needs="launch.device=cuda,any")
    """Let ranks share GPUs: a rank takes the GPU with the number (local rank % GPUs). Messages go through host memory,
    which is slow: for tests. A rank may hold its share of device_memory, counted as if a machine had one GPU."""
    transport: str = key("auto", one_of("auto", "plain", "channels"))
    """How messages between stages travel. `plain`: in batches over the pipeline's process group, by torch's
    batch_isend_irecv alone; nothing is received ahead, and no pair overlaps its forward and backward. `channels`: while
    stages compute, on a connection for every pair of ranks and direction. `auto`: `plain` on CUDA, else `channels`."""
    env: dict[str, str] = key(dict)
    """Environment variables set for every rank."""
    start_limit: str = key("30m", TIME)
    """Time limit for the start of the ranks, including loading; then the job ends and names the rank at fault. It also
    limits a SLURM job's health check and its first step, in which nodes import their container, and how long agents
    wait for another that lives but does not go on."""
    edge_limit: str = key("2m", TIME)
    """Time limit for each connection and each group in the test before the first step."""
    first_step_limit: str = key("60m", TIME)
    """Time limit without progress in the first step (compilation), in a save, in an evaluation; then the job ends."""
    step_limit: str | None = key(None, TIME, known_as="--distributed-timeout-minutes")
    """Time limit without progress in later steps; none: ten times the slowest step so far, at least 2 minutes and at
    most the longest of the other limits."""
    spares: int = key(
        0, not_negative(MOST_RANKS), options="-k --no-kill -K --kill-on-bad-exit", jobs="node slurm kubernetes"
    )
    """`ppctl node`, jobs: hosts beyond `nodes` that wait to replace a lost host; more are refused."""
    max_restarts: int = key(3, not_negative(MOST_RANKS), jobs="node slurm kubernetes")
    """`ppctl node`, jobs: how often in a row ranks are started again although they have done no new step."""
    shrink: str = key("wait", one_of("wait", "requeue", "smaller"), jobs="node slurm kubernetes")
    """`ppctl node`, jobs: what follows if a host is lost and none takes its place. `wait`: wait for one. `requeue`: end
    with exit code 75 after `shrink_after`; a JobSet is restarted. `smaller`: go on then with what `ppctl plan --lost`
    plans for the hosts left. A SLURM job gets no other node: it goes on smaller immediately, or is requeued without the
    lost one. Jobs of more than two nodes start again if half of them or fewer are left."""
    shrink_after: str = key("10m", TIME, jobs="node kubernetes", needs="launch.shrink=requeue,smaller")
    """`ppctl node`, pods: how long to wait for another host after a loss before the run ends or goes on smaller."""
    account: str | None = key(None, ONE_LINE, options="-A --account", jobs="slurm")
    """SLURM: the account that pays (sbatch --account)."""
    qos: str | None = key(None, ONE_LINE, options="-q --qos", jobs="slurm")
    """SLURM: the quality of service."""
    partition: str | None = key(None, ONE_LINE, options="-p --partition", verbatim=True, jobs="slurm")
    """SLURM: the partition, or several with commas."""
    time: str | None = key(None, SLURM_TIME, options="-t --time", jobs="slurm")
    """SLURM: the job's time limit, as 30 (minutes), 12:00:00 or 2-00:00:00; none takes the partition's."""
    constraint: str | None = key(None, ONE_LINE, options="-C --constraint", verbatim=True, jobs="slurm")
    """SLURM: features that every node must have."""
    exclusive: bool = key(False, options="--exclusive", jobs="slurm")
    """SLURM: share no node with other jobs."""
    cpus_per_task: int | None = key(None, positive(MOST_RANKS), options="-c --cpus-per-task", jobs="slurm")
    """SLURM: CPUs of one rank."""
    container_image: str | None = key(
        None, ONE_LINE, options="--container-image", verbatim=True, jobs="slurm", support=_PYXIS
    )
    """SLURM with pyxis: the image that the ranks run in."""
    container_mounts: list[str] | None = key(
        None, options="--container-mounts", jobs="slurm", support=_PYXIS, needs=_CONTAINER
    )
    """SLURM with pyxis: what is mounted in the container, as SRC:DST[:FLAGS]."""
    container_workdir: str | None = key(
        None, ONE_LINE, options="--container-workdir", jobs="slurm", support=_PYXIS, needs=_CONTAINER
    )
    """SLURM with pyxis: the directory in the container that ranks start in."""
    setup: list[str] | None = key(None, jobs="slurm", lines=True)
    """SLURM: lines of bash that the job's script runs first, as "module load cuda"."""
    health_check: str | None = key(None, ONE_LINE, verbatim=True, jobs="slurm")
    """SLURM: a command that runs first on every node; the job is requeued without the nodes where it fails."""
    sbatch_args: list[str] | None = key(None, jobs="slurm")
    """SLURM: further options of sbatch, as [--mail-type=END]."""
    srun_args: list[str] | None = key(None, jobs="slurm")
    """SLURM: further options of the srun that starts the agents of the nodes."""
    after: str | None = key(None, ONE_LINE, options="-d --dependency --kill-on-invalid-dep", jobs="slurm")
    """SLURM: a run (directory, id, job number) that must finish first."""
    python: str | None = key(None, ONE_LINE, jobs="slurm kubernetes")
    """The interpreter that runs the ranks of a job; none takes the submitting interpreter, in pods python3."""
    code: str = key("pinned", one_of("pinned", "live"), jobs="slurm kubernetes")
    """Jobs: `pinned` ends a job whose nodes hold other code of ppctl than was submitted; `live` takes any."""
    signal_lead: int = key(300, positive(10**7), options="--signal", jobs="slurm")
    """SLURM: how many seconds before the time limit the ranks save and end."""
    max_requeues: int = key(10, not_negative(), options="--requeue --no-requeue --open-mode", jobs="slurm kubernetes")
    """How often a job may requeue itself; how often a pod may start its ranks again, and have a successor."""
    kubernetes: KubernetesConfig = key(KubernetesConfig)


@dataclass(kw_only=True, slots=True)
class LogConfig:
    """Files and services that a run records into."""

    name: str = key("run", DIRECTORY_NAME)
    """Name of the run: a directory under `dir`. A recipe that sets none gives its own name."""
    dir: str = key(
        "runs", NOT_EMPTY, known_as="output_dir runs_dir --save", options="-o --output -e --error", verbatim=True
    )
    """Where run directories go."""
    interval: int = key(1, positive(), names="--log-interval")
    """Steps between lines in metrics.jsonl, on the screen and for trackers. Every n-th step has a line, and so have the
    first step of a start, the last, and those with an evaluation. A line is about one step, not a mean."""
    tensorboard: bool = False
    """Write the keys of metrics.jsonl for TensorBoard as well."""
    tensorboard_dir: str | None = key(
        None, NOT_EMPTY, known_as="--tensorboard-dir", needs="log.tensorboard=true", verbatim=True
    )
    """The directory for TensorBoard's files of all runs, each run's below it in NAME/ID; none: the run's trace/."""
    wandb: bool = False
    """Send the keys of metrics.jsonl to Weights & Biases as well."""
    wandb_project: str | None = key(None, ONE_LINE, known_as="--wandb-project", needs="log.wandb=true")
    """Weights & Biases: the project; none takes log.name."""
    wandb_entity: str | None = key(None, ONE_LINE, known_as="--wandb-entity", needs="log.wandb=true")
    """Weights & Biases: the user or team that owns the project; none takes the user's own default."""
    wandb_tags: list[str] | None = key(None, needs="log.wandb=true")
    """Weights & Biases: tags of the run, as [baseline,lr-search]."""
    wandb_dir: str | None = key(None, NOT_EMPTY, known_as="--wandb-save-dir", needs="log.wandb=true", verbatim=True)
    """Weights & Biases: the directory for its files, in wandb/ below it; none: the run's trace/."""
    wandb_mode: str | None = key(None, one_of("online", "offline"), needs="log.wandb=true")
    """Weights & Biases: offline keeps files for `wandb sync` and needs no login; none takes WANDB_MODE, or online."""
    trace: str | None = key(None, STEPS)
    """Steps in which every action of every rank is kept: 10:12 is steps 10 and 11. `ppctl trace` shows them."""
    torch_profile: str | None = key(None, STEPS, known_as="profile")
    """Steps that torch's profiler records on every rank: profile_traces/iteration_N/rankM_trace.json in the run's
    directory, and on GPUs memory_snapshot/iteration_N/rankM_memory_snapshot.pickle."""
    gradients: str | None = key(None, STEPS)
    """Steps whose gradients, and fingerprints of messages, every rank keeps, for `ppctl parity A B`."""
    prompts: list[str] | None = key(None, lines=True)
    """Texts (with data.format=chat users' messages) that the model continues when the run has finished; the results are
    printed and kept in result.json. None: a piece of the data, or a conversation up to an answer."""
    profile: bool = key(False, support=Support(LATER, "measured costs per stage"))
    """Write the measured costs of every stage."""
