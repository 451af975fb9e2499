# The body of every examples/NAME/vime.sh, which sources it after setting
#   recipe         the path by which vime.sh was called; its lines 2 to 29 are the usage
#   model_options  what suits the model: layout and memory
# shellcheck shell=bash disable=SC2154

root=$(cd "$(dirname "$recipe")/../.." && pwd)
usage() { sed -n '2,29s/^# \{0,1\}//p' "$recipe"; }
fail() { echo "vime.sh: $1" >&2; usage >&2; exit 2; }

nodes=1 gpus=8 train_gpus='' port=6379 megatron=${MEGATRON:-} python=${PYTHON:-python3}
join='' serve='' print='' settings=() positional=() more=()
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit 0 ;;
    --print) print=yes ;;
    --nodes | --gpus | --train-gpus | --join | --serve | --port | --set)
      [ $# -ge 2 ] || fail "$1 needs a value"
      case $1 in
        --nodes) nodes=$2 ;;
        --gpus) gpus=$2 ;;
        --train-gpus) train_gpus=$2 ;;
        --join) join=$2 ;;
        --serve) serve=$2 ;;
        --port) port=$2 ;;
        --set) settings+=("$2") ;;
      esac
      shift ;;
    --) shift; more=("$@"); break ;;
    -*) fail "unknown option $1; flags of the framework come behind --" ;;
    *) positional+=("$1") ;;
  esac
  shift
done

if [ -n "$join" ]; then  # a further node: it waits for work until the head's cluster ends
  exec ray start --address "$join" --num-gpus "$gpus" --disable-usage-stats --block
fi
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
if [ -n "$serve" ]; then exec "$python" -m tether.vime.serve "$serve" --port "$port" ${more[@]+"${more[@]}"}; fi
[ ${#positional[@]} -eq 5 ] || fail "got ${#positional[@]} arguments, expected FRAMEWORK MODEL DATA OUT ROLLOUTS"
framework=${positional[0]} model=${positional[1]} data=${positional[2]} out=${positional[3]} rollouts=${positional[4]}
[ -f "$framework/train.py" ] || fail "$framework: no train.py here; FRAMEWORK is a checkout of VIME or slime"
[ -f "$model/config.json" ] || fail "$model: no config.json here; MODEL is a Hugging Face directory"
[ -f "$data" ] || fail "$data: no such file; DATA is JSON lines with prompt and label"
mkdir -p "$out"
out=$(cd "$out" && pwd) model=$(cd "$model" && pwd) data=$(realpath "$data")
case " ${settings[*]-} " in *" tether_engine=http"*) served=yes ;; *) served='' ;; esac
if [ "$nodes" -gt 1 ] && [ -z "$served" ]; then
  fail "--nodes $nodes trains on all of them: start a server elsewhere (--serve) and name it with --set tether_engine=http://..."
fi
# A server draws the samples, or the last device of this machine does.
per_node=${train_gpus:-$([ -n "$served" ] && echo "$gpus" || echo $((gpus / 2)))}
[ -n "$served" ] || settings=(tether_engine_devices=$((gpus - 1)) ${settings[@]+"${settings[@]}"})

export PYTHONPATH=$root:$framework${megatron:+:$megatron}${PYTHONPATH:+:$PYTHONPATH}
printed=$("$python" -m tether.vime.flags "$model" --save "$out/checkpoints" --settings "$out/tether.yaml" \
  ${settings[@]+"${settings[@]}"}) || exit 2
mapfile -t derived <<<"$printed"

command=("$python" "$framework/train.py" "${derived[@]}"
  --actor-num-nodes "$nodes" --actor-num-gpus-per-node "$per_node" --num-gpus-per-node "$gpus"
  # One engine of the framework's own, which only follows: without any it would never write weights out.
  --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1
  # --ref-load too: where --load has no checkpoint yet, the framework takes that, before our hooks are there.
  --hf-checkpoint "$model" --ref-load "$model" --load "$out/checkpoints" --save "$out/checkpoints" --save-interval 20
  --update-weight-mode full --update-weight-transport disk --update-weight-disk-dir "$out/weights"
  --update-weight-disk-keep-files
  --prompt-data "$data" --input-key prompt --label-key label --rollout-shuffle --rm-type math
  --num-rollout "$rollouts" --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
  --rollout-max-prompt-len 1024 --rollout-max-response-len 2048 --rollout-temperature 1.0 --rollout-top-p 1.0
  --use-dynamic-batch-size --max-tokens-per-gpu 16384 --data-pad-size-multiplier 8
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.0
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
  "${model_options[@]}" ${more[@]+"${more[@]}"})
if [ -n "$print" ]; then printf '%s\n' "${command[@]}"; exit 0; fi

address=$(hostname -I | cut -d' ' -f1)
ray start --head --node-ip-address "$address" --port "$port" --num-gpus "$gpus" --disable-usage-stats
trap 'ray stop' EXIT  # of this node; it ends the nodes that joined
for _ in $(seq 300); do
  joined=$("$python" -c 'import ray, sys; ray.init("auto", logging_level="ERROR"); print(len(ray.nodes()))' | tail -1)
  [ "$joined" -ge "$nodes" ] && break
  echo "vime.sh: $joined of $nodes nodes are there; on each other one: vime.sh --join $address:$port --gpus $gpus" >&2
  sleep 2
done
[ "$joined" -ge "$nodes" ] || { echo "vime.sh: $joined of $nodes nodes joined within 10 minutes" >&2; exit 1; }
environment=$("$python" - <<'PY'
import json, os
print(json.dumps({"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}))
PY
)
ray job submit --address "http://$address:8265" --runtime-env-json "$environment" -- "${command[@]}"
