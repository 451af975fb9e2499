# The body of every examples/NAME/run.sh, which sources it after setting
#   name           of the example: its folder, its demo
#   recipe         the path by which run.sh was called; its lines 2 to 13 are the usage
#   demo_settings  what suits the demo, before the caller's own settings
# shellcheck shell=bash disable=SC2154

root=$(cd "$(dirname "$recipe")/../.." && pwd)
usage() { sed -n '2,13s/^# \{0,1\}//p' "$recipe"; }
fail() { echo "run.sh: $1" >&2; usage >&2; exit 2; }

positional=() settings=() switches=() launch=() out='' updates='' train_devices=1
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) help=yes ;;
    --resume) resume=yes switches+=(--resume) ;;
    --dry-run) switches+=(--dry-run) ;;
    --resume-from | --allow-change | --max-restarts | --nodes | --node-rank | --rendezvous)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --resume-from) resume=yes switches+=("$1" "$2") ;;
        --allow-change) switches+=("$1" "$2") ;;
        *) launch+=("$1" "$2") ;;
      esac
      shift ;;
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

first_free() {  # the demo's own OUT: a finished run is left alone
  local candidate=$1 number=2
  while [ -e "$candidate" ]; do candidate=$1-$((number++)); done
  echo "$candidate"
}

if [ ${#positional[@]} = 0 ]; then
  demo=$root/runs/$name-demo-model
  (cd "$root" && "$python" -m "examples.$name.make_demo" "$demo")
  model=$demo/warm data=$demo/train.jsonl updates=${updates:-4}
  if [ -z "$out" ]; then
    out=$root/runs/$name-demo
    if [ "${resume:-no}" = no ] && [ -e "$out" ]; then
      out=$(first_free "$out")
      echo "run.sh: runs/$name-demo is taken (--resume goes on with it), so this run goes to runs/${out##*/}" >&2
    fi
  fi
  again=(--out "$out" ${settings[@]+"${settings[@]}"})
  settings=("${demo_settings[@]}" ${settings[@]+"${settings[@]}"})
else
  model=${positional[0]} data=${positional[1]} out=${out:-${positional[2]}} updates=${updates:-${positional[3]}}
  again=("$model" "$data" "$out" "$updates" ${settings[@]+"${settings[@]}"})
fi

# One process that nobody restarts needs no launcher; a dry run starts none.
module=tether.train
if [ "$train_devices" != 1 ] || [ ${#launch[@]} != 0 ]; then
  case " ${switches[*]-} " in *" --dry-run "*) launch=() ;; *) module=tether.launch again+=(${launch[@]+"${launch[@]}"}) ;; esac
fi
TETHER_RECIPE=$(printf ' %q' "$recipe" "${again[@]}")
export TETHER_RECIPE=${TETHER_RECIPE# }
exec "$python" -m $module ${launch[@]+"${launch[@]}"} --model "$model" --data "$data" --out "$out" --updates "$updates" \
  ${switches[@]+"${switches[@]}"} ${settings[@]+"${settings[@]}"}
