#!/usr/bin/env bash
# A real SLURM of pretended nodes on this machine, listening on loopback only, for the tests beside this file.
#   cluster.sh install | start DIR | stop DIR
# `install` wants root on Debian or Ubuntu; `start` wants root and the packages. Everything lies under DIR, but for one
# marked line in /etc/hosts, which `stop` takes out again: ranks find the first node by its name.
set -euo pipefail

NODES=17
PORT=${PPCTL_SLURM_PORT:-26817} # slurmctld's; a slurmd's are the next ones, srun's begin 100 above
CPUS=8
GPUS=4

names() { for ((i = 1; i <= NODES; i++)); do echo "ppctl$i"; done; }

install() {
  local missing=()
  command -v munged >/dev/null || missing+=(munge)
  command -v slurmctld >/dev/null || missing+=(slurmctld)
  command -v slurmd >/dev/null || missing+=(slurmd)
  command -v sbatch >/dev/null || missing+=(slurm-client)
  command -v shellcheck >/dev/null || missing+=(shellcheck)
  if ((${#missing[@]} == 0)); then return; fi
  # The packages would start daemons of their own; a policy keeps them from it where there is none yet.
  local policy=/usr/sbin/policy-rc.d made=
  if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    made=1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
  if [ -n "$made" ]; then rm "$policy"; fi
}

configure() {
  local host number=0 name
  host=$(hostname -s)
  mkdir -p "$DIR"/{run,log,state,munge,gpus}
  chmod 711 "$DIR/munge"
  cat >"$SLURM_CONF" <<CONF
ClusterName=ppctl
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SrunPortRange=$((PORT + 100))-$((PORT + 199))
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job is held back for as long as its credential lives.
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool.%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
# No cgroups, no accounting daemon, no MPI: none of them is there.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
KillWait=10
MinJobAge=3600
InactiveLimit=0
SlurmdTimeout=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
CONF
  for name in $(names); do
    number=$((number + 1))
    echo "NodeName=$name NodeHostname=$host NodeAddr=127.0.0.1 Port=$((PORT + number)) CPUs=$CPUS Gres=gpu:fake:$GPUS"
  done >>"$SLURM_CONF"
  local usual="DefaultTime=10:00 MaxTime=60:00"
  cat >>"$SLURM_CONF" <<CONF
# Most have nodes of their own, so that tests run side by side: no node fails, or is taken, under another test's job.
PartitionName=main Nodes=ppctl[1-3] Default=YES $usual
PartitionName=sick Nodes=ppctl[4-6] $usual
PartitionName=frail Nodes=ppctl[7-9] $usual
PartitionName=low Nodes=ppctl[10-11] PriorityTier=1 PreemptMode=REQUEUE GraceTime=30 $usual
PartitionName=high Nodes=ppctl[10-11] PriorityTier=10 $usual
PartitionName=spared Nodes=ppctl[12-14] $usual
PartitionName=headless Nodes=ppctl[15-17] $usual
CONF
  # slurmd insists on device files before it hands out GPUs: copies of /dev/null will do.
  for ((i = 0; i < GPUS; i++)); do mknod "$DIR/gpus/gpu$i" c 1 3; done
  echo "Name=gpu Type=fake File=$DIR/gpus/gpu[0-$((GPUS - 1))]" >"$DIR/gres.conf"
  (umask 077 && head -c 128 /dev/urandom >"$DIR/munge/key")
}

start() {
  configure
  # shellcheck disable=SC2046 # one word a node
  echo "127.0.0.1" $(names) "$MARK" >>/etc/hosts
  munged --force --socket="$DIR/munge/socket" --key-file="$DIR/munge/key" --pid-file="$DIR/run/munged.pid" \
    --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed" 2>>"$DIR/log/munged.err"
  slurmctld -c -f "$SLURM_CONF"
  local name deadline=$((SECONDS + 60))
  for name in $(names); do slurmd -c -f "$SLURM_CONF" -N "$name"; done
  until [ "$(timeout 5 sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$NODES" ]; do
    if ((SECONDS >= deadline)) || ! pid slurmctld >/dev/null; then
      tail -n 15 "$DIR"/log/* >&2
      exit 1
    fi
    sleep 0.2
  done
}

# The process number of a daemon of ours that lives.
pid() {
  local number
  number=$(cat "$DIR/run/$1.pid" 2>/dev/null) && [ -d "/proc/$number" ] && echo "$number"
}

# Ask daemons of ours to end, all at once; those that do not are killed. munged goes last: the others want it.
end() {
  local name number numbers=()
  for name in "$@"; do
    number=$(pid "$name") && kill "$number" && numbers+=("$number")
  done
  for ((i = 0; i < 50; i++)); do
    kill -0 "${numbers[@]}" 2>/dev/null || break
    sleep 0.1
  done
  kill -9 "${numbers[@]}" 2>/dev/null || true
}

stop() {
  local job number
  if pid slurmctld >/dev/null; then
    # Steps first: an srun that dies before its step leaves the step's daemon waiting for it.
    for job in $(timeout 5 squeue -h -o %A | sort -u); do
      timeout 5 scancel --signal=KILL "$job" 2>/dev/null || true
      timeout 5 scancel "$job" 2>/dev/null || true
    done
    for ((i = 0; i < 50; i++)); do
      if [ -z "$(timeout 5 squeue -h -o %i)" ]; then break; fi
      sleep 0.2
    done
  fi
  # shellcheck disable=SC2046 # one word a daemon
  end $(names | sed 's/^/slurmd./') slurmctld
  end munged
  # What a step left behind has our configuration in its environment.
  while IFS=/ read -r _ _ number _; do
    if leftover "/proc/$number"; then kill -9 "$number" 2>/dev/null || true; fi
  done < <(grep -lzxF "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null)
  # /etc/hosts may be a mount: written anew in place, never renamed.
  local kept
  kept=$(grep -vF "$MARK" /etc/hosts) && printf '%s\n' "$kept" >/etc/hosts
}

leftover() {
  [[ $(readlink "$1/exe") == */slurmstepd* ]] || grep -qz '^SLURM_JOB_ID=' "$1/environ" 2>/dev/null
}

if [ "${1:-}" = install ]; then
  install
  exit
fi
DIR=${2:?which directory}
MARK="# ppctl-tests:$DIR"
export SLURM_CONF=$DIR/slurm.conf
case $1 in
start) start ;;
stop) stop ;;
*) exit 2 ;;
esac
