#!/usr/bin/env bash
# Trains an Ouro by GRPO with VIME or slime on Ray: their driver, data and losses, Tether's model, engine and weights.
#
#   examples/ouro/vime.sh FRAMEWORK MODEL DATA OUT ROLLOUTS [options] [-- flags of the framework]
#   examples/ouro/vime.sh --join ADDRESS:PORT --gpus N      on every further machine, once the first one says so
#   examples/ouro/vime.sh --serve MODEL --port N -- --context TOKENS    a server that draws samples:
#                                                             --set tether_engine=http://HOST:N
#
#   FRAMEWORK   a checkout of VIME or slime, in whose environment this runs; MEGATRON=path of Megatron-LM if that is
#               not on PYTHONPATH, PYTHON=interpreter if not python3
#   MODEL       a Hugging Face directory
#   DATA        JSON lines with prompt and label
#   OUT         gets checkpoints/, weights/, tether.yaml, tether_logs/; the same OUT again goes on from its checkpoint
#   ROLLOUTS    how many in all
#
#   --nodes N         machines that train (default 1); beyond one, samples come from a server
#   --gpus N          devices of each (default 8)
#   --train-gpus N    of those, devices that train (default: half of them, or all if a server draws the samples). The
#                     framework wants one more for an engine of its own: a machine that joins with --gpus 1 will do
#   --port N          Ray's port (default 6379)
#   --set KEY=VALUE   a setting of Tether's, may be repeated:
#                       tether_engine=local | 1+2 (prefill and decode processes) | http://HOST:PORT (a server's)
#                       tether_execution=POLICY (such as early:0.9:2:4; the checkpoint's own)
#                       tether_engine_devices=6,7 (of this machine; the last one)  tether_engine_directory=DIR
#                       tether_kv_cache_bytes=N  tether_deadline_seconds=N
#                       tether_trip_grad_norm=stop:10  tether_trip_score_difference=stop:0.1
#   --print           print the command of the framework, start nothing
#
# docs/vime.md says what of this was run.
set -euo pipefail

recipe=${BASH_SOURCE[0]}
# 1.4B parameters fit one device with their optimizer; more of them share the samples.
model_options=(--tensor-model-parallel-size 1 --expert-model-parallel-size 1)
source "$(dirname "$recipe")/../vime.sh"
