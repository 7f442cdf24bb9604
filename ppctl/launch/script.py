"""The batch script of a submitted job, made of `job.sbatch`: plain bash that a person can read, edit and submit.

    launch.env, launch.setup        on the first node
    launch.health_check             once on every node; a node where it fails is left out, and the job requeued
    ppctl.launch.enter              once on every node: the node sees the run, and has the submitted code
    ppctl.agent                     once on every node: starts the node's ranks, and again whenever one is lost
    scontrol requeue                if the mark `requeue.<job>.<life>` is there: all ranks have saved, or a node is lost
    ppctl.launch.leave              otherwise, once: reports how the job ended, from the files that its ranks wrote

The modules must keep their names, which are in scripts of runs that can still be requeued.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ppctl.config.quantities import seconds
from ppctl.config.schema import RunConfig
from ppctl.errors import pasted
from ppctl.host.devices import gpus_needed


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The values that a job script is made from."""

    config: RunConfig
    run: str
    """The run directory, absolute."""
    nodes: int
    """With the spares."""
    ranks_per_node: int
    command: str
    """The command line that submitted the job."""
    python: str
    """The interpreter's absolute path."""
    code: str
    """The package's digest, or `live`."""
    after: str | None = None
    """The job that must finish first."""


def render(job: SlurmJob) -> str:
    """The script's text: every value in it is one line, or made one by `pasted`."""
    launch, settings = job.config.launch, ""
    if launch.env:
        settings += "\n# launch.env\n" + "".join(f"export {name}={_q(value)}\n" for name, value in launch.env.items())
    if launch.setup:
        settings += "\n# launch.setup\n" + "".join(f"{line}\n" for line in launch.setup)
    checked = launch.health_check is not None
    return _filled(
        "job.sbatch",
        command=job.command,
        directory=job.run,
        directives="".join(f"#SBATCH {line}\n" for line in directives(job)),
        run=_q(job.run),
        python=_q(job.python),
        code=_q(job.code),
        most=str(launch.max_requeues),
        limit=str(seconds(launch.start_limit)),
        settings=settings,
        container=" ".join(map(_q, _container_options(job))),
        agents=" ".join(map(_q, _agent_options(job))),
        again=_filled("requeue.sbatch"),
        health=_filled("health_check.sbatch", check=_q(launch.health_check), SICK_NODE="PP-E625") if checked else "",
        NOT_REQUEUED="PP-E621",
        NO_START="PP-E622",
        REQUEUED_OFTEN="PP-E626",
    )


def render_array(job: SlurmJob, runs: Sequence[Path]) -> str:
    """The script of an array job like `job` whose task number n runs the script in the run directory `runs[n]`."""
    shared = [line for line in directives(job) if not line.startswith("--output=")]
    lines = "".join(f"#SBATCH {line}\n" for line in (*shared, f"--array=0-{len(runs) - 1}"))
    return _filled(
        "array.sbatch", command=job.command, directives=lines, runs="\n".join(f"  {_q(run)}" for run in runs)
    )


def _filled(name: str, **values: str) -> str:
    """The text of the file `name` beside this one, with each `{key}` of `values` replaced."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return re.sub(rf"\{{({'|'.join(values)})\}}", lambda match: values[match[1]], text)


def directives(job: SlurmJob) -> Iterator[str]:
    """sbatch's options, as they stand after #SBATCH."""
    launch, logs = job.config.launch, f"{job.run}/logs/job.log".replace("%", "%%")
    yield f"--job-name={_word('ppctl-' + job.config.log.name)}"
    yield f"--nodes={job.nodes}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    if launch.device == "cuda":
        yield f"--gpus-per-node={gpus_needed(job.ranks_per_node, share=launch.share_gpu)}"
    if launch.cpus_per_task is not None:
        yield f"--cpus-per-task={launch.cpus_per_task}"
    for name in ("account", "qos", "partition", "time", "constraint"):
        if getattr(launch, name) is not None:
            yield f"--{name}={_word(getattr(launch, name))}"
    if launch.exclusive:
        yield "--exclusive"
    yield f"--output={_word(logs)}"
    yield "--open-mode=append"
    yield "--requeue"
    if launch.spares or launch.shrink == "smaller":
        yield "--no-kill"  # the job outlives a node; by default SLURM requeues it
    yield f"--signal=USR1@{launch.signal_lead}"
    if job.after is not None:
        yield f"--dependency=afterok:{job.after}"
        yield "--kill-on-invalid-dep=yes"
    yield from map(_word, launch.sbatch_args or ())


def _agent_options(job: SlurmJob) -> Iterator[str]:
    """srun's options for one task per node, independent of the others, with all resources of the node's ranks."""
    launch = job.config.launch
    yield from (f"--nodes={job.nodes}", f"--ntasks={job.nodes}", "--ntasks-per-node=1")
    yield from ("--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--input=none")
    if launch.device == "cuda":
        yield "--gpu-bind=none"  # every rank sees all GPUs of its node, to send to them directly
    if launch.cpus_per_task is not None:
        yield f"--cpus-per-task={launch.cpus_per_task * job.ranks_per_node}"  # srun does not take it from sbatch
    yield from launch.srun_args or ()


def _container_options(job: SlurmJob) -> Iterator[str]:
    launch = job.config.launch
    if launch.container_image is not None:
        yield f"--container-image={launch.container_image}"
        if launch.container_mounts:
            yield f"--container-mounts={','.join(launch.container_mounts)}"
        if launch.container_workdir:
            yield f"--container-workdir={launch.container_workdir}"


_q = pasted


def _word(text: str) -> str:
    """`text` as one word of an #SBATCH line, in double quotes if needed."""
    return text if _q(text) == text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
