"""The batch script of a submitted job: a plain bash file that a person can read, edit and submit by hand.

    launch.env, launch.setup        on the first node
    launch.health_check             once on every node; a node where it fails is left out, and the job requeued
    ppctl.launch.enter              once on every node: the node sees the run, and has the submitted code
    ppctl.launch.rank               once per rank: becomes the worker
    scontrol requeue                if the mark `requeue.<job>.<life>` is there: all ranks have saved, the job goes on
    ppctl.launch.leave              once, else: how the job ended, from the files that its ranks have written

The modules' names stand in scripts of runs that can still be requeued.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ppctl.config.schema import RunConfig
from ppctl.errors import pasted
from ppctl.host.devices import gpus_needed

NO_START, SICK_NODE, REQUEUED_OFTEN = "PP-E622", "PP-E625", "PP-E626"
"""The codes of errors that the script itself prints."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The values that a job script is made from."""

    config: RunConfig
    run: str
    """The run directory, absolute."""
    nodes: int
    ranks_per_node: int
    command: str
    """The command line that submitted it."""
    python: str
    """The interpreter's absolute path."""
    code: str
    """The package's digest, or `live`."""
    after: str | None = None
    """The job that must finish first."""


def render(job: SlurmJob) -> str:
    """The script's text: every value in it is one line, or goes through `pasted`, which makes it one."""
    launch = job.config.launch
    blocks = [_HEAD.format(command=job.command, run=job.run)]
    blocks += [f"#SBATCH {line}\n" for line in directives(job)]
    blocks.append(_VALUES.format(run=_q(job.run), python=_q(job.python), code=_q(job.code), n=launch.max_requeues))
    if launch.env:
        blocks += ["\n# launch.env\n", *(f"export {name}={_q(value)}\n" for name, value in launch.env.items())]
    if launch.setup:
        blocks += ["\n# launch.setup\n", *(f"{line}\n" for line in launch.setup)]
    blocks.append(_array("container", _container_options(job), "The ranks' container, if there is one."))
    blocks.append(_array("ranks", _rank_options(job), "How srun starts the ranks."))
    blocks.append(_FUNCTIONS.replace("{REQUEUED_OFTEN}", REQUEUED_OFTEN))
    if launch.health_check is not None:
        blocks.append(_HEALTH.format(check=_q(launch.health_check), SICK_NODE=SICK_NODE))
    return "".join([*blocks, _BODY.replace("{NO_START}", NO_START)])


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
    yield f"--signal=USR1@{launch.signal_lead}"
    if job.after is not None:
        yield f"--dependency=afterok:{job.after}"
        yield "--kill-on-invalid-dep=yes"
    yield from map(_word, launch.sbatch_args or ())


def _rank_options(job: SlurmJob) -> Iterator[str]:
    launch = job.config.launch
    yield f"--nodes={job.nodes}"
    yield f"--ntasks={job.nodes * job.ranks_per_node}"
    yield f"--ntasks-per-node={job.ranks_per_node}"
    yield from ("--kill-on-bad-exit=1", "--wait=60", "--input=none")
    if launch.device == "cuda":
        yield "--gpu-bind=none"  # every rank sees all GPUs of its node, so that they send to each other directly
    if launch.cpus_per_task is not None:
        yield f"--cpus-per-task={launch.cpus_per_task}"  # srun does not take it from sbatch
    yield from launch.srun_args or ()


def _container_options(job: SlurmJob) -> Iterator[str]:
    launch = job.config.launch
    if launch.container_image is not None:
        yield f"--container-image={launch.container_image}"
        if launch.container_mounts:
            yield f"--container-mounts={','.join(launch.container_mounts)}"
        if launch.container_workdir:
            yield f"--container-workdir={launch.container_workdir}"


def _array(name: str, words: Iterable[str], comment: str) -> str:
    return f"\n# {comment}\n{name}=({' '.join(map(_q, words))})\n"


_q = pasted


def _word(text: str) -> str:
    """`text` as one word of an #SBATCH line: sbatch knows double quotes."""
    return text if _q(text) == text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


_HEAD = """\
#!/bin/bash
# {command}
# Its run directory: {run}
# Written by `ppctl submit`. SLURM keeps a copy: to change what runs, edit the config and submit again.
# shellcheck disable=SC2016 # what stands in single quotes is for an inner shell, or for no shell at all

"""

_VALUES = """\

set -u -o pipefail # no -e: every exit code below is looked at

run={run}
python={python}
code={code} # what ppctl's files add up to on the machine that submitted
most={n} # requeues that this job may ask for
life=${{SLURM_RESTART_COUNT:-0}}
mark=$run/requeue.$SLURM_JOB_ID.$life # rank 0 writes it once all ranks have saved and the job is to go on
"""

_FUNCTIONS = """
# TERM reaches this shell when the job is cancelled, or when SLURM takes its nodes and requeues it by itself.
ended=
trap 'ended=--ended' TERM
trap : USR1 # the ranks get it from SLURM directly

on_every_node() {
  srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --input=none "$@"
}

# Start the job again, on other nodes than those in $1, because of $3. Without a slot in `most`, leave with $2.
requeue() {
  if ((life >= most)); then
    echo "error {REQUEUED_OFTEN}: the job has requeued itself $life times (launch.max_requeues=$most)" >&2
    echo "  try: ppctl requeue $SLURM_JOB_ID" >&2
    exit "$2"
  fi
  trap '' TERM # from here on SLURM ends this shell
  local without=$1 before
  echo "requeue $((life + 1)) of at most $most${without:+, without $without}: $3"
  before=$(scontrol -o show job "$SLURM_JOB_ID" | sed -n 's/.* ExcNodeList=\\([^ ]*\\).*/\\1/p')
  scontrol requeue "$SLURM_JOB_ID" || true # after a node's failure SLURM has done it already
  if [ -n "$without" ]; then
    if [ -n "$before" ] && [ "$before" != "(null)" ]; then without=$before,$without; fi
    scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$without"
  fi
  exit 0
}
"""

_HEALTH = """
# launch.health_check, once on every node; where it fails, the job goes on without that node.
check={check}
sick=$(on_every_node bash -c '(eval "$1") >&2 || echo "$SLURMD_NODENAME"' check "$check" | sort -u | paste -sd, -)
if [ -n "$sick" ]; then
  echo "error {SICK_NODE}: the health check failed on $sick" >&2
  requeue "$sick" 1 "a health check has failed"
fi
"""

_BODY = """
# Once on every node: the interpreter starts, ppctl is what was submitted, the run directory is there.
if ! wrong=$(on_every_node "${container[@]}" "$python" -m ppctl.launch.enter "$run" --code "$code"); then
  wrong=${wrong%%$'\\n'*}
  echo "${wrong:-error {NO_START}: $python does not start with ppctl on every node; the lines above say why}" >&2
  exit 2
fi

# One process per rank. SLURM's signals go to them; `wait` returns early when one reaches this shell.
srun "${ranks[@]}" "${container[@]}" "$python" -m ppctl.launch.rank "$run" &
step=$!
# A lost node would keep srun waiting until SLURM sees the loss, minutes later: the ranks' word is enough.
(until [ -e "$mark" ]; do sleep 2; done; sleep 8; kill -KILL "$step") &
watch=$!
while true; do
  wait "$step" 2>/dev/null # not even when it is killed
  step_code=$?
  if ((step_code <= 128)) || ! kill -0 "$step" 2>/dev/null; then break; fi
done
kill "$watch" 2>/dev/null || true

if [ -e "$mark" ] && [ -z "$ended" ]; then
  { read -r without; read -r why; } <"$mark"
  requeue "$without" 75 "$why"
fi

# How it went is what the ranks have written; srun's exit code alone says little.
here=()
if ((${#container[@]})); then here=(srun --nodes=1 --ntasks=1 --input=none "${container[@]}"); fi
exec "${here[@]}" "$python" -m ppctl.launch.leave "$run" --step-code "$step_code" ${ended:+"$ended"}
"""
