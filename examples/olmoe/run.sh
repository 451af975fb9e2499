#!/usr/bin/env bash
# Trains an OLMoE by GRPO: rollouts by vLLM, training by Megatron-Core, on whatever this machine has.
#
#   examples/olmoe/run.sh [options]                          a tiny demo, built on first use: 4 updates on a CPU
#   examples/olmoe/run.sh MODEL DATA OUT UPDATES [options]   the same on a real checkpoint
#
#   --resume          go on from the newest checkpoint in OUT
#   --resume-from N   go on from the checkpoint of update N; --allow-change FIELD: of a setting that may differ
#   --max-restarts N  start a run that fails again, N times at most; several machines: docs/parallelism.md
#   --out DIR         another OUT (the demo's default: the first free one of runs/olmoe-demo, runs/olmoe-demo-2, ...)
#   --updates N       another number of updates, counted from the very first
#   --set KEY=VALUE   a setting; may be repeated (--help lists them)
#   --dry-run         check everything, print the settings and a memory estimate, start nothing
set -euo pipefail

name=olmoe recipe=${BASH_SOURCE[0]}
# What suits the demo's 0.6M parameters and four-token answers.
demo_settings=(--set lr=1e-3 --set lr_warmup_updates=5 --set prompts_per_update=32 --set max_new_tokens=8
               --set max_concurrent_samples=256)
source "$(dirname "$recipe")/../recipe.sh"
