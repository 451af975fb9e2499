#!/usr/bin/env bash
# Makes .venv from exact pins and installs the project into it. Does nothing, quickly, when that is done already.
#
#   scripts/setup.sh            CPU: Python 3.11, requirements/cpu.txt + dev.txt, about 3 minutes and 3 GB
#   scripts/setup.sh --gpu      CUDA: Python 3.12, requirements/gpu.txt + dev.txt (torch brings its CUDA libraries)
#   scripts/setup.sh --python   the same as without, then prints the interpreter to use as the only line on stdout
#   scripts/setup.sh --evaluate adds requirements/evaluate.txt (lm-evaluation-harness, 350 MB) to what is used
#
# An environment that already provides everything (an active VIRTUAL_ENV, or the python3 on PATH) is used as it is;
# only the project itself is added to it, because vLLM finds our plugin through installed metadata.
# Where packages come from is pip's own business: its configuration, PIP_INDEX_URL, PIP_FIND_LINKS.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
pins=cpu want_python=3.11 print_python=no evaluate=no
for argument in "$@"; do
  case $argument in
    --gpu) pins=gpu want_python=3.12 ;;
    --python) print_python=yes ;;
    --evaluate) evaluate=yes ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
  esac
done

say() { echo "setup: $*" >&2; }
fail() { say "$1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }
finish() {
  if [ $evaluate = yes ]; then add_evaluate "$1"; fi
  if [ $print_python = yes ]; then echo "$1"; fi
  exit 0
}
add_evaluate() {  # add_evaluate PYTHON: pinned in a file of its own, because only evaluation and its tests need it
  "$1" -c 'import importlib.util as u, sys
sys.exit(not all(u.find_spec(m) for m in ("lm_eval", "datasets", "accelerate", "pytablewriter")))' 2>/dev/null && return
  say "adding lm-evaluation-harness (requirements/evaluate.txt) to the environment of $1"
  "$1" -m pip install --quiet --no-deps --requirement "$root/requirements/evaluate.txt" >&2 ||
    fail "could not install lm-evaluation-harness into the environment of $1, see above."
}

# A stamp names everything the environment was made from, the folder included: a copied .venv points elsewhere.
stamp() { (cd "$root" && echo "$root $pins" && sha256sum "requirements/$pins.txt" requirements/dev.txt pyproject.toml); }
is_done() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.tether-stamp" 2>/dev/null)" = "$(stamp)" ]; }

provides() {  # provides PYTHON: all third-party parts can be found, without importing them
  "$1" -c 'import importlib.util as u, sys
sys.exit(sys.version_info < (3, 11) or not all(u.find_spec(m) for m in
  ("torch", "vllm", "megatron.core", "transformers", "safetensors", "msgspec", "zmq", "psutil", "pytest")))' 2>/dev/null
}
has_project() {  # has_project PYTHON: vLLM would find our plugin; which checkout it runs is PYTHONPATH's business
  "$1" -c 'import importlib.metadata as m, sys
sys.exit("providers.registry:register_vllm" not in {e.value for e in m.entry_points(group="vllm.general_plugins")})' 2>/dev/null
}
add_project() {  # needs setuptools in the environment and no network
  "$1" -m pip install --quiet --no-deps --no-build-isolation --no-index --editable "$root" >&2
}
use_existing() {
  provides "$1" || return 1
  if ! has_project "$1"; then
    say "adding the project (editable) to the environment of $1"
    add_project "$1" || fail "could not install the project into the environment of $1" \
      "Make that environment writable, or leave it (deactivate) and run this again to get a .venv of our own."
  fi
}

find_python() {
  local candidate
  for candidate in "python$want_python" python3 python; do
    if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = $want_python ]; then
      echo "$candidate"
      return
    fi
  done
  fail "Python $want_python is needed (the pinned wheels exist for it) and none was found on PATH." \
    "Tried: python$want_python, python3, python. Install it (a package python$want_python with python$want_python-venv," \
    "pyenv, conda or uv all will do), or activate an environment with Python $want_python, and run this again."
}

pip_install() {  # pip_install WHAT ARGUMENTS...: shows pip's last words when it fails
  local what=$1
  shift
  say "installing $what (a few minutes)"
  "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >"$venv/setup.log" 2>&1 && return
  tail -n 8 "$venv/setup.log" >&2
  fail "pip could not install $what (whole log: $venv/setup.log)." \
    "Without a network, or behind a mirror, tell pip where to look: PIP_INDEX_URL or PIP_FIND_LINKS, or pip's own" \
    "configuration (python -m pip config debug). Then run this again; what is already installed is kept."
}

install_torch_requirements() {  # the CUDA libraries and Triton that a CUDA build of torch asks for
  pip_install "torch's own requirements" --constraint "$root/requirements/$pins.txt" \
    "$(grep '^torch==' "$root/requirements/$pins.txt")"
}

check_torch() {
  if [ $pins = gpu ]; then install_torch_requirements; fi
  "$venv/bin/python" -c 'import torch' 2>/dev/null && return
  if [ $pins = cpu ]; then
    say "this torch is not a CPU build and needs 3 GB of libraries more, fetching them. To avoid that, add PyTorch's CPU" \
      "wheels to pip's configuration (extra-index-url or find-links), remove .venv and run this again"
    install_torch_requirements
  fi
  "$venv/bin/python" -c 'import torch' >&2 || fail "torch is installed and cannot be imported, see above."
}

make_venv() {
  local python
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
     [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != $want_python ]; then
    python=$(find_python)
    [ ! -e "$venv" ] || say "$venv cannot be used as it is: making it anew"
    "$python" -m venv --clear "$venv" >&2 || fail "$python could not make $venv." \
      "On Debian and Ubuntu the module is a package of its own: python$want_python-venv."
  fi
  rm -f "$venv/.tether-stamp"
  pip_install "requirements/$pins.txt and dev.txt into .venv" \
    --no-deps --requirement "$root/requirements/$pins.txt" --requirement "$root/requirements/dev.txt"
  check_torch
  add_project "$venv/bin/python" || fail "could not install the project into $venv, see above."
  stamp >"$venv/.tether-stamp"
  say "done: $venv"
}

if [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$venv" ] && use_existing "$VIRTUAL_ENV/bin/python"; then
  finish "$VIRTUAL_ENV/bin/python"
fi
if is_done; then finish "$venv/bin/python"; fi
if [ ! -e "$venv" ] && use_existing "$(command -v python3 || echo python3)"; then finish "$(command -v python3)"; fi

exec 9<"$root/requirements/$pins.txt"   # calls at the same time wait for the first one
if command -v flock >/dev/null; then flock 9; fi
is_done || make_venv 9<&-
finish "$venv/bin/python"
