#!/usr/bin/env bash
# Trains an Ouro by GRPO: rollouts by vLLM, training by Megatron-Core, on whatever this machine has.
#
#   examples/ouro/run.sh [options]                          a tiny demo, built on first use: 4 updates on a CPU
#   examples/ouro/run.sh MODEL DATA OUT UPDATES [options]   the same on a real checkpoint
#
#   --resume          go on from the newest checkpoint in OUT
#   --resume-from N   go on from the checkpoint of update N; --allow-change FIELD: of a setting that may differ
#   --max-restarts N  start a run that fails again, N times at most; several machines: docs/parallelism.md
#   --out DIR         another OUT (the demo's default: the first free one of runs/ouro-demo, runs/ouro-demo-2, ...)
#   --updates N       another number of updates, counted from the very first
#   --set KEY=VALUE   a setting; may be repeated (--help lists them)
#   --dry-run         check everything, print the settings and a memory estimate, start nothing
set -euo pipefail

name=ouro recipe=${BASH_SOURCE[0]}
# What suits the demo's 0.4M parameters and four-token answers.
demo_settings=(--set lr=1e-3 --set lr_warmup_updates=5 --set prompts_per_update=32 --set max_new_tokens=8
               --set max_concurrent_samples=256 --set remote_code=ours)
source "$(dirname "$recipe")/../recipe.sh"
