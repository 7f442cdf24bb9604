#!/usr/bin/env bash
# The first hour on a machine with GPUs, in parts of at most 9 minutes, in the order in which their answers matter.
#
#   tests/gpu/first_run.sh parts                what there is: parts, steps, limits
#   tests/gpu/first_run.sh part NAME [NAME...]  these parts; every one adds to the record in --out and writes the page anew
#   tests/gpu/first_run.sh                      all of them, one after the other, whatever fails
#   tests/gpu/first_run.sh wheels DIR [3.12..]  with network: fill DIR, for these Pythons (default: 3.11 to 3.14)
#   options: --wheels DIR   without network: packages come from DIR (all but torch), whatever Python of those it is
#            --python PYTHON, --out DIR (logs and record), --page FILE, --only STEP,STEP
#            --cpu          tiny sizes on the CPU, and four times the limits: proves this script, measures nothing of a GPU
#            --dry-run      print the commands and their limits
#
# Needs torch >= 2.11 and what the tests need. Sizes follow from the device's free memory. Logs and the record steps.tsv lie
# in --out (default: runs/gpu-DATE); results_page.py writes a dated page under benchmarks/ from them. docs/first-hour.md says
# what the answers mean.
# shellcheck disable=SC2317  # parts are called by the names that they are given
set -u -o pipefail # no -e: a step that fails is a result
cd "$(dirname "$0")/../.." || exit 2

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
wheels='' out='' page='' only='' dry='' device=cuda
parts=(machine two queues kernels ranks memory dense moe newer rest)
packages=(hydra-core omegaconf rich numpy safetensors xxhash ml_dtypes PyYAML Jinja2 pytest pytest-timeout pytest-xdist hypothesis)

# Everything but torch, as wheels, with pip itself: antlr4, which Hydra needs, has only sources there.
collect() {
  local into=$1 version
  shift
  [ $# -gt 0 ] || set -- 3.11 3.12 3.13 3.14
  "$python" -m pip wheel --no-deps --wheel-dir "$into" -c constraints.txt antlr4-python3-runtime &&
    "$python" -m pip wheel --no-deps --wheel-dir "$into" . && "$python" -m pip download --no-deps --dest "$into" pip || return
  for version in "$@"; do
    "$python" -m pip download --dest "$into" --find-links "$into" -c constraints.txt --python-version "$version" \
      --only-binary=:all: --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 "${packages[@]}" ||
      echo "nothing for Python $version" >&2
  done
}

# A Python with the packages of $1 and the torch of $python, which need not have pip.
unpack() {
  local torch site own=$out/venv/bin/python pip
  pip=$(find "$1" -name "pip-*.whl" | sort | tail -1)
  [ -n "$pip" ] || { echo "there is no wheel of pip in $1: tests/gpu/first_run.sh wheels $1" >&2; return 2; }
  torch=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)') || return
  [ -x "$own" ] || "$python" -m venv --without-pip "$out/venv" || return
  "$own" "$pip/pip" install --quiet --no-index --find-links "$1" "${packages[@]}" || return
  "$own" "$pip/pip" install --quiet --no-index --find-links "$1" --no-deps ppctl || return
  site=$("$own" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  echo "$torch" >"$site/torch.pth"
  python=$own
}

chosen=()
case ${1:-} in
  wheels)
    [ -n "${2:-}" ] || { echo "say where to: tests/gpu/first_run.sh wheels DIR" >&2; exit 2; }
    collect "${@:2}"
    exit
    ;;
  parts) dry=1; shift ;;
  part)
    shift
    while [ $# -gt 0 ] && [[ $1 != --* ]]; do
      [[ " ${parts[*]} " == *" $1 "* ]] || { echo "there is no part $1; there are ${parts[*]}" >&2; exit 2; }
      chosen+=("$1")
      shift
    done
    [ ${#chosen[@]} -gt 0 ] || { echo "say which part: ${parts[*]}" >&2; exit 2; }
    ;;
esac
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=1 ;;
    --cpu) device=cpu ;;
    --wheels | --out | --page | --only | --python)
      [ $# -gt 1 ] || { echo "$1 wants a value" >&2; exit 2; }
      declare "${1#--}=$2"
      shift
      ;;
    *) echo "unknown: $1 (the head of $0 lists the options)" >&2; exit 2 ;;
  esac
  shift
done
day=$(date +%F)
out=${out:-runs/gpu-$day}
page=${page:-benchmarks/results-gpu-$day.md}
if [ -z "$dry" ]; then
  mkdir -p "$out" && touch "$out/steps.tsv" || exit 2
  if [ -n "$wheels" ]; then unpack "$wheels" || exit 2; fi
fi

failed=0 part=''
# What an exit code means, and where to look.
ending() {
  case $1 in
    0) ;;
    77) echo ': skipped' ;;
    124 | 137) echo ", past its limit: $2" ;;
    *) echo ", failed: $2" ;;
  esac
}
# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 began code
  shift 2
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then return; fi
  [ "$device" = cuda ] || limit=$((4 * limit)) # nobody lends a CPU by the minute, and others use it
  if [ -n "$dry" ]; then printf '%-8s %-20s %4d s  %s\n' "$part" "$name" "$limit" "$*"; return; fi
  printf '%s: %s (at most %d s) ' "$part" "$name" "$limit"
  began=$SECONDS
  timeout --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  [ "$code" = 0 ] || [ "$code" = 77 ] || failed=1
  printf 'exit code %d after %d s%s\n' "$code" "$((SECONDS - began))" "$(ending "$code" "$out/$name.log")"
  sed -i "/^$name\t/d" "$out/steps.tsv" # a step that runs again has one line, its last
  printf '%s\t%d\t%d\t%d\t%s\n' "$name" "$limit" "$((SECONDS - began))" "$code" "$part" >>"$out/steps.tsv"
}
measure() { step "$1" "$2" "$python" tests/gpu/measure.py "${@:3}" --device "$device"; }
measure_with() { step "$1" "$2" env "$3" "$python" tests/gpu/measure.py "${@:4}" --device "$device"; }
tests() { step "$1" "$2" "$python" -m pytest -m gpu -rfEs -p no:cacheprovider "${@:3}" tests/gpu; }

run_machine() { # what the machine has, and what NCCL does with one rank
  measure facts 60 facts
  measure nccl-alone 120 nccl-alone
  local gpus='import os; from ppctl.launch.machine import count_gpus; print(min(max(2, count_gpus(os.environ)), 64))'
  step doctor 300 "$python" -m ppctl doctor --json --ranks "$("$python" -c "$gpus" 2>/dev/null || echo 2)"
}
run_queues() { # launches, hardware queues, and a retry of the allocator beside a spinning kernel
  measure_with launches-lazy 90 CUDA_MODULE_LOADING=LAZY launches lazy
  measure_with launches-eager 90 CUDA_MODULE_LOADING=EAGER launches eager
  measure_with queues-8 60 CUDA_DEVICE_MAX_CONNECTIONS=8 queues 8
  measure_with queues-32 60 CUDA_DEVICE_MAX_CONNECTIONS=32 queues 32
  measure_with retry-segments 120 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False retry segments
  measure_with retry-expandable 120 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True retry expandable
}
run_kernels() { # against their references
  tests kernels-products 120 -k "grouped or scaled"
  tests kernels-attention 180 -k "packed or by_blocks or heads"
  tests kernels-optimizer 60 -k "adamw"
  tests kernels-compiled 180 -k "compiled"
}
run_ranks() { # several ranks on one device over gloo, against one rank on the CPU
  local case
  for case in pp2 ep2-dualpipev tp2-sp cp2 dp2-full offload async-save pp2-channels; do measure "ranks-$case" 65 same "$case"; done
}
run_memory() { # against the plan
  measure memory-dense 270 memory dense
  measure memory-moe 270 memory moe
}
rates() { # beside the plan's, and beside a bare torch loop of the same layers; where a step's seconds go
  measure "mfu-$1" 120 rate "$1"
  measure "mfu-$1-compiled" 180 compiled "$1"
  measure "where-$1" 110 profile "$1"
  measure "fp8-$1" 130 fp8 "$1"
}
run_dense() { rates dense; }
run_moe() { rates moe; }
run_newer() { # what came after the last run on a device, against one rank on the CPU and against steps that are known
  local case
  for case in mla replay; do measure "ranks-$case" 65 same "$case"; done
  measure ranks-tp2-compiled 130 same tp2-compiled
  tests newer-tests 150 -k "newer"
  measure restart 120 restart
}
run_two() { # what two devices alone can answer
  local case
  for case in pp2 pp2-channels ep2-dualpipev; do measure "nccl-$case" 95 nccl "$case"; done
  tests nccl-tests 255 -k "over_nccl and dist_tier"
}
run_rest() {
  tests tests 200 -k "not grouped and not scaled and not packed and not by_blocks and not heads and not adamw and not compiled and not dist_tier and not pinned and not newer"
  tests shared-tests 300 -k "pinned"
}

for part in "${chosen[@]:-${parts[@]}}"; do "run_$part"; done
[ -n "$dry" ] && exit 0
"$python" tests/gpu/results_page.py "$out" "$page" || failed=1
echo "to send back: $page, and the logs: tar czf gpu-$day.tgz $out/steps.tsv $out/*.log"
exit "$failed"
