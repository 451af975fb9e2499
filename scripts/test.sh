#!/usr/bin/env bash
# Everything the tests need, then the tests. Arguments go to pytest: scripts/test.sh tests/unit -k digest
# Without a -m of your own the long matrices (slow) and the tests that need CUDA (gpu) are left out.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/setup.sh --python)
scripts/setup.sh --evaluate || echo "test.sh: without lm-evaluation-harness its tests are skipped" >&2

# One thread a process: results repeat and processes do not fight for cores. No compiler on CPU, no hub.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
# This checkout's code in every process, whichever one the environment was installed from.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

# Two files at a time, in their order.
workers=()
if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n "${TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder); fi

# A style fault fails the run at its end, so that one run shows everything and pytest's summary comes last.
style=0
if "$python" -m ruff --version >/dev/null 2>&1; then "$python" -m ruff check . || style=1; fi
case " $* " in
  *" -m "*) marks=() ;;
  *) marks=(-m "not slow and not gpu") ;;
esac
"$python" -m pytest ${workers[@]+"${workers[@]}"} ${marks[@]+"${marks[@]}"} "$@" && exit $style
