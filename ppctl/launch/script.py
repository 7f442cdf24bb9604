"""The batch script: one plain bash file that a person can read, edit and submit by hand.

Knows sbatch's and srun's options and the order of a job's life. Must not know SLURM's commands' answers, nor files: it
makes a text from a config, a plan's size and paths.

The ranks decide how the job ends, by files in the run directory: the mark `requeue.<job>.<life>` says that all of them
have saved and that the job is to go on. No exit code says that.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ppctl.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """What a script is made for."""

    config: RunConfig
    run: str
    """The run directory, absolute."""
    nodes: int
    ranks_per_node: int
    command: str
    """What was typed."""
    python: str
    """The interpreter's absolute path."""
    code: str
    """The package's digest, or `live`."""
    after: str | None = None
    """The job that must have ended well first."""


def render(batch: Batch) -> str:
    """The script's text."""
    launch = batch.config.launch
    parts = [_HEAD.format(command=_one_line(batch.command), run=_one_line(batch.run))]
    parts.append("".join(f"#SBATCH {line}\n" for line in directives(batch)))
    parts.append(_VALUES.format(run=_q(batch.run), python=_q(batch.python), code=_q(batch.code), n=launch.max_requeues))
    if launch.env:
        parts.append("\n# launch.env\n" + "".join(f"export {name}={_q(value)}\n" for name, value in launch.env.items()))
    if launch.setup:
        parts.append("\n# launch.setup\n" + "".join(f"{line}\n" for line in launch.setup))
    parts.append(_array("container", _container(batch), "The ranks' container, if there is one."))
    parts.append(_array("ranks", list(_ranks(batch)), "How srun starts the ranks."))
    parts.append(_FUNCTIONS.replace("{OFTEN}", OFTEN))
    if launch.health_check is not None:
        parts.append(_HEALTH.format(check=_q(launch.health_check), SICK=SICK))
    parts.append(_BODY.replace("{STARTS}", STARTS))
    return "".join(parts)


STARTS, SICK, OFTEN = "PP-E622", "PP-E625", "PP-E626"
"""What the script itself finds wrong: the interpreter does not start, a node is sick, requeued too often."""


def directives(batch: Batch) -> Iterator[str]:
    """sbatch's options, as they stand behind #SBATCH."""
    launch, logs = batch.config.launch, f"{batch.run}/logs/job.log".replace("%", "%%")
    yield f"--job-name={_word('ppctl-' + batch.config.log.name)}"
    yield f"--nodes={batch.nodes}"
    yield f"--ntasks-per-node={batch.ranks_per_node}"
    if launch.device == "cuda":
        yield f"--gpus-per-node={batch.ranks_per_node}"
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
    if batch.after is not None:
        yield f"--dependency=afterok:{batch.after}"
        yield "--kill-on-invalid-dep=yes"
    yield from map(_word, launch.sbatch_args or ())


def _ranks(batch: Batch) -> Iterator[str]:
    launch = batch.config.launch
    yield f"--nodes={batch.nodes}"
    yield f"--ntasks={batch.nodes * batch.ranks_per_node}"
    yield f"--ntasks-per-node={batch.ranks_per_node}"
    yield "--kill-on-bad-exit=1"
    yield "--wait=60"
    yield "--input=none"
    if launch.device == "cuda":
        yield "--gpu-bind=none"  # every rank sees its node's GPUs: messages between them go direct
    if launch.cpus_per_task is not None:
        yield f"--cpus-per-task={launch.cpus_per_task}"  # srun does not take it from sbatch
    yield from launch.srun_args or ()


def _container(batch: Batch) -> list[str]:
    launch = batch.config.launch
    if launch.container_image is None:
        return []
    words = [f"--container-image={launch.container_image}"]
    if launch.container_mounts:
        words.append(f"--container-mounts={','.join(launch.container_mounts)}")
    if launch.container_workdir:
        words.append(f"--container-workdir={launch.container_workdir}")
    return words


def _array(name: str, words: list[str], comment: str) -> str:
    return f"\n# {comment}\n{name}=({' '.join(map(_q, words))})\n"


_q = shlex.quote


def _word(text: str) -> str:
    """`text` as one word of an #SBATCH line: sbatch knows quotes, and # begins no comment inside them."""
    return text if shlex.quote(text) == text else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return " ".join(text.split())


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
    echo "error {OFTEN}: the job has requeued itself $life times (launch.max_requeues=$most)" >&2
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
  echo "error {SICK}: the health check failed on $sick" >&2
  requeue "$sick" 1 "a health check has failed"
fi
"""

_BODY = """
# Once on every node: the interpreter starts, ppctl is what was submitted, the run directory is there.
if ! wrong=$(on_every_node "${container[@]}" "$python" -m ppctl.launch.enter "$run" --code "$code"); then
  wrong=${wrong%%$'\\n'*}
  echo "${wrong:-error {STARTS}: $python does not start with ppctl on every node; the lines above say why}" >&2
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
