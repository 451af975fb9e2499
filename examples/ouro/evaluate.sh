#!/usr/bin/env bash
# Evaluates an export with lm-evaluation-harness and prints its table.
#
#   examples/ouro/evaluate.sh HF_DIR [--depth POLICY] [--model hf|vllm] [--tasks T,T] [lm_eval's own options]
#
#   --depth POLICY    full, fixed:K, early:THRESHOLD:MIN:MAX; default: what the directory's config.json says
#   --model vllm      by vLLM with this project's plugin instead of transformers
#   --tasks T,T       any of lm_eval's; default: the demo's held-out problems, offline
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=$("$root/scripts/setup.sh" --python --evaluate)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHDYNAMO_DISABLE=${TORCHDYNAMO_DISABLE:-1}
exec "$python" -m examples.evaluate "$@"
