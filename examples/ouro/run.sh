#!/usr/bin/env bash
# Trains an Ouro by GRPO: rollouts by vLLM, training by Megatron-Core, on whatever this machine has.
#
#   examples/ouro/run.sh [options]                          a tiny demo, built on first use: 4 updates on a CPU
#   examples/ouro/run.sh MODEL DATA OUT UPDATES [options]   the same on a real checkpoint
#
#   --resume          go on from the newest checkpoint in OUT
#   --out DIR         another OUT (the demo's default: the first free one of runs/ouro-demo, runs/ouro-demo-2, ...)
#   --updates N       another number of updates, counted from the very first
#   --set KEY=VALUE   a setting; may be repeated (--help lists them)
#   --dry-run         check everything, print the settings and a memory estimate, start nothing
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
usage() { sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
fail() { echo "run.sh: $1" >&2; usage >&2; exit 2; }

positional=() settings=() switches=() out='' updates='' train_devices=1
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) help=yes ;;
    --resume) resume=yes switches+=(--resume) ;;
    --dry-run) switches+=(--dry-run) ;;
    --out | --updates | --set)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --out) out=$2 ;;
        --updates) updates=$2 ;;
        --set) settings+=(--set "$2"); case $2 in train_devices=*) train_devices=${2#*=} ;; esac ;;
      esac
      shift ;;
    -*) fail "unknown option $1" ;;
    *) positional+=("$1") ;;
  esac
  shift
done

case ${#positional[@]} in 0 | 4) ;; *) fail "got ${#positional[@]} arguments, expected none or MODEL DATA OUT UPDATES" ;; esac

python=$("$root/scripts/setup.sh" --python)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
# One thread a process: results repeat and processes do not fight for cores. No compiler on CPU, no hub.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1} HF_HUB_OFFLINE=1

if [ "${help:-no}" = yes ]; then usage; exec "$python" -m tether.train --help; fi

# What suits the demo's 0.4M parameters and four-token answers.
demo_settings=(--set lr=1e-3 --set lr_warmup_updates=5 --set prompts_per_update=32 --set max_new_tokens=8
               --set max_concurrent_samples=256)

first_free() {  # the demo's own OUT: a finished run is left alone
  local candidate=$1 number=2
  while [ -e "$candidate" ]; do candidate=$1-$((number++)); done
  echo "$candidate"
}

if [ ${#positional[@]} = 0 ]; then
  demo=$root/runs/ouro-demo-model
  (cd "$root" && "$python" -m examples.ouro.make_demo "$demo")
  model=$demo/warm data=$demo/train.jsonl updates=${updates:-4}
  if [ -z "$out" ]; then
    out=$root/runs/ouro-demo
    if [ "${resume:-no}" = no ] && [ -e "$out" ]; then
      out=$(first_free "$out")
      echo "run.sh: runs/ouro-demo is taken (--resume goes on with it), so this run goes to runs/${out##*/}" >&2
    fi
  fi
  again=(--out "$out" ${settings[@]+"${settings[@]}"})
  settings=("${demo_settings[@]}" ${settings[@]+"${settings[@]}"})
else
  model=${positional[0]} data=${positional[1]} out=${out:-${positional[2]}} updates=${updates:-${positional[3]}}
  again=("$model" "$data" "$out" "$updates" ${settings[@]+"${settings[@]}"})
fi

launcher=("$python")
if [ "$train_devices" != 1 ]; then launcher+=(-m torch.distributed.run --standalone --nproc-per-node "$train_devices"); fi
TETHER_RECIPE=$(printf ' %q' "${BASH_SOURCE[0]}" "${again[@]}")
export TETHER_RECIPE=${TETHER_RECIPE# }
exec "${launcher[@]}" -m tether.train --model "$model" --data "$data" --out "$out" --updates "$updates" \
  ${switches[@]+"${switches[@]}"} ${settings[@]+"${settings[@]}"}
