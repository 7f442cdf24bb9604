#!/usr/bin/env bash
# The first 45 minutes on one GPU: every command with a limit of its own, one after the other, whatever fails.
#
#   tests/gpu/first_run.sh                      on a machine with a GPU, torch >= 2.11 and what the tests need
#   tests/gpu/first_run.sh --wheels DIR         the same without network: packages come from DIR (all but torch)
#   tests/gpu/first_run.sh wheels DIR [3.12]    with network: fill DIR, for that Python (default: this one)
#   tests/gpu/first_run.sh --dry-run            print the commands and their limits
#   tests/gpu/first_run.sh --cpu                tiny sizes on the CPU: proves this script, measures nothing
#   options: --python PYTHON, --out DIR (logs), --page FILE, --only STEP,STEP (with --out of a run: adds to its record)
#
# Logs lie in --out (default: runs/gpu-DATE); at the end results_page.py writes a dated page under benchmarks/ from them.
set -u -o pipefail # no -e: a step that fails is a result
cd "$(dirname "$0")/../.." || exit 2

python=${PYTHON:-.venv/bin/python}
command -v "$python" >/dev/null || python=python3
wheels='' out='' page='' only='' dry='' device=cuda
packages=(hydra-core omegaconf rich numpy safetensors PyYAML pytest pytest-timeout pytest-xdist hypothesis)

# Everything but torch, as wheels: antlr4, which Hydra needs, has only sources there.
collect() {
  local into=$1 version=${2:-} target=()
  if [ -n "$version" ]; then
    target=(--python-version "$version" --only-binary=:all: --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64)
  fi
  "$python" -m pip wheel --no-deps --wheel-dir "$into" -c constraints.txt antlr4-python3-runtime &&
    "$python" -m pip wheel --no-deps --wheel-dir "$into" . &&
    "$python" -m pip download --dest "$into" --find-links "$into" -c constraints.txt "${target[@]}" "${packages[@]}"
}

# A Python with the packages of $1 and the torch of $python, whether that is the system's or a venv's.
unpack() {
  local torch site
  torch=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)') || return
  "$python" -m venv --without-pip "$out/venv" || return
  "$python" -m pip --python "$out/venv/bin/python" install --no-index --find-links "$1" "${packages[@]}" || return
  "$python" -m pip --python "$out/venv/bin/python" install --no-index --find-links "$1" --no-deps ppctl || return
  site=$("$out/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return
  echo "$torch" >"$site/torch.pth"
  python=$out/venv/bin/python
}

if [ "${1:-}" = wheels ]; then
  [ -n "${2:-}" ] || { echo "say where to: tests/gpu/first_run.sh wheels DIR" >&2; exit 2; }
  collect "$2" "${3:-}"
  exit
fi
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
  mkdir -p "$out" || exit 2
  [ -n "$only" ] || : >"$out/steps.tsv" # some steps again, or the rest: the others' record stays
  if [ -n "$wheels" ]; then unpack "$wheels" || exit 2; fi
fi

failed=0
# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 began code
  shift 2
  if [ -n "$only" ] && [[ ",$only," != *",$name,"* ]]; then return; fi
  if [ -n "$dry" ]; then printf '%-16s %4d s  %s\n' "$name" "$limit" "$*"; return; fi
  printf '%s (at most %d s) ' "$name" "$limit"
  began=$SECONDS
  timeout --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  [ "$code" = 0 ] || [ "$code" = 77 ] || failed=1
  echo "exit code $code after $((SECONDS - began)) s"
  touch "$out/steps.tsv" && sed -i "/^$name\t/d" "$out/steps.tsv" # a step that runs again has one line, its last
  printf '%s\t%d\t%d\t%d\n' "$name" "$limit" "$((SECONDS - began))" "$code" >>"$out/steps.tsv"
}

# One rank with a cut model, as large as one H200 holds; on the CPU two layers of the recipe's miniature.
one=(pp=1 layout=null nodes=1 gpus_per_node=1 mbs=1 parallel.data_parallel_sharding=none "launch.device=$device")
if [ "$device" = cuda ]; then
  one+=(gbs=8 seq=4096 launch.device_memory=139GiB cost.device=h200)
  dense=(+recipe=llama3_8b vpp=1 model.num_layers=16 "${one[@]}")
  moe=(+recipe=qwen3_30b_a3b ep=1 model.num_layers=8 "${one[@]}")
  steps=20 rounds=9 share=(launch.share_gpu=true)
else
  one+=(gbs=2 seq=64 model.num_layers=2)
  dense=(+recipe=llama3_8b +scale=smoke vpp=1 "${one[@]}")
  moe=(+recipe=qwen3_30b_a3b +scale=smoke ep=1 "${one[@]}")
  steps=4 rounds=1 share=()
fi
small=(+recipe=quickstart "launch.device=$device" steps=10 vpp=1 gbs=16 mbs=2 "${share[@]}")
measure=("$python" tests/gpu/measure.py)

step facts 60 "${measure[@]}" facts
step doctor 90 "$python" -m ppctl doctor --ranks 1
step tests 480 "$python" -m pytest -m gpu -p no:cacheprovider tests/gpu
step stage 180 "$python" benchmarks/stage.py --device "$device" --rounds "$rounds"
step memory-dense 150 "${measure[@]}" memory dense -- "${dense[@]}"
step memory-moe 150 "${measure[@]}" memory moe -- "${moe[@]}"
step mfu-dense 330 "${measure[@]}" train dense --floor 0.38 --goal 0.50 -- "${dense[@]}" train.compile=true "steps=$steps"
step mfu-moe 330 "${measure[@]}" train moe --floor 0.25 --goal 0.35 -- "${moe[@]}" train.compile=true "steps=$steps"
step share-pp2 100 "${measure[@]}" same pp2 -- "${small[@]}" pp=2
step share-pp4 100 "${measure[@]}" same pp4 -- "${small[@]}" pp=4
step nccl-one-gpu 120 "${measure[@]}" nccl pp2 -- "${small[@]}" pp=2
step launches-lazy 60 env CUDA_MODULE_LOADING=LAZY "${measure[@]}" launches lazy
step launches-eager 60 env CUDA_MODULE_LOADING=EAGER "${measure[@]}" launches eager
step queues-8 40 env CUDA_DEVICE_MAX_CONNECTIONS=8 "${measure[@]}" queues 8
step queues-32 40 env CUDA_DEVICE_MAX_CONNECTIONS=32 "${measure[@]}" queues 32
step fp8-dense 330 "${measure[@]}" fp8 dense -- "${dense[@]}" train.compile=true "steps=$steps" model.fp8=hybrid

[ -n "$dry" ] && exit 0
"$python" tests/gpu/results_page.py "$out" "$page" || failed=1
exit "$failed"
