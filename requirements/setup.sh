#!/usr/bin/env bash
# Makes .venv hold what the named sets need, and the embedded model. Quick when nothing changed since the last time.
# Usage: requirements/setup.sh [test] [lint] [ray] [eval] (what the artifact itself needs is always included)
#        requirements/setup.sh --packages           (only the pinned packages: neither the artifact itself nor the model)
# PYTHON: the interpreter to build the environment with. VENV: where, instead of .venv.
# TORCH: cpu, cuda or auto (cuda where an NVIDIA GPU answers).
# TORCH_INDEX: the package index that serves PyTorch's CPU builds; empty to ask only the indexes pip is set up with.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
torch=${TORCH:-auto}
torch_index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}
venv=${VENV:-.venv}
packages_only=; if [ "${1:-}" = --packages ]; then packages_only=yes; shift; fi
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf '%s\n' "setup: $*" >&2; }
die() { say "$*"; exit 2; }
hash_of() { { printf '%s\n' "$@"; for f in "$@"; do if [ -f "$f" ]; then cat "$f"; fi; done; } | "$python" -c '
import hashlib, sys
print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'; }

command -v "$python" >/dev/null || die "no $python on PATH: install Python 3.11 or newer, or set PYTHON=/path/to/python3."
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  die "$python is Python $version and 3.11 or newer is needed: set PYTHON=/path/to/python3.11."

if [ "$torch" = auto ]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then torch=cuda; else torch=cpu; fi
fi
case $torch in cpu|cuda) ;; *) die "TORCH is '$torch': say cpu, cuda or auto.";; esac

# A set is installed when its stamp holds the hash of all that decided what was installed.
stamp_of() { printf '%s' "$venv/.stamp-$1"; }
fresh() { [ -f "$(stamp_of "$1")" ] && [ "$(cat "$(stamp_of "$1")")" = "$2" ]; }

pip() { "$venv/bin/python" -m pip "$@"; }

# Prints pip's words and stops when a download does not have its pinned hash: that is never worked around.
stop_on_hash_mismatch() {
  if grep -q -e 'DO NOT MATCH THE HASHES' "$1"; then cat "$1" >&2; die "a download does not have its pinned hash."; fi
}

locked_platform() {
  "$venv/bin/python" -c '
import platform, sys
here = (sys.platform, platform.machine())
locked = here in {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")}
sys.exit(not (locked and (3, 11) <= sys.version_info[:2] <= (3, 14)))'
}

install_torch() {
  local log=$venv/.torch.log
  if [ "$torch" = cpu ]; then
    if pip install --quiet --no-deps --require-hashes -r requirements/torch-cpu.txt >"$log" 2>&1; then return; fi
    stop_on_hash_mismatch "$log"
    if [ -n "$torch_index" ]; then
      if PIP_EXTRA_INDEX_URL="${PIP_EXTRA_INDEX_URL:+$PIP_EXTRA_INDEX_URL }$torch_index" \
         pip install --quiet --no-deps --require-hashes -r requirements/torch-cpu.txt >"$log" 2>&1; then return; fi
      stop_on_hash_mismatch "$log"
    fi
    say "PyTorch's CPU build was not to be had (TORCH_INDEX='$torch_index'); taking the CUDA build instead, some 3 GB."
  fi
  pip install --quiet --require-hashes -r requirements/torch-cuda.txt
}

install_run() {
  if locked_platform; then
    install_torch
    pip install --quiet --require-hashes -r requirements/run.txt
  else
    say "no locked set for Python $version on $(uname -sm): installing the newest compatible releases, not the pinned ones."
    pip install --quiet .
    pip uninstall --quiet --yes sparse-decoding-artifact
    pip install --quiet 'setuptools>=77'
  fi
  if [ -n "$packages_only" ]; then return; fi
  # The locked setuptools builds the editable install, so nothing unpinned is fetched for it.
  pip install --quiet --no-deps --no-build-isolation --editable .
  pip check >/dev/null || { pip check >&2 || true; die "the installed packages do not fit together."; }
}

key=$(hash_of "$PWD" "$version" "$packages_only" "$torch" pyproject.toml requirements/run.txt "requirements/torch-$torch.txt")
if ! fresh run "$key"; then
  say "installing into $venv (Python $version, $torch build of PyTorch; a minute or two and 2 GB)"
  if ! "$venv/bin/python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
    "$python" -m venv --clear "$venv" ||
      die "$python cannot make virtual environments: install its venv package (Debian and Ubuntu: apt install python3-venv)."
  fi
  install_run
  printf '%s' "$key" >"$(stamp_of run)"
  ARTIFACT_FIRST_SETUP=1
fi

for set in "$@"; do
  [ -f "requirements/$set.txt" ] || die "there is no requirements/$set.txt."
  key=$(hash_of "$version" "requirements/$set.txt")
  fresh "$set" "$key" && continue
  if locked_platform; then pip install --quiet --require-hashes -r "requirements/$set.txt"
  else pip install --quiet -r "requirements/$set.in"; fi
  printf '%s' "$key" >"$(stamp_of "$set")"
done

if [ -n "$packages_only" ]; then exit 0; fi
# WikiText-2 is only looked for on the first setup: asking an unreachable hub takes seconds.
if [ -n "${ARTIFACT_FIRST_SETUP:-}" ]; then "$venv/bin/python" -m artifact.embedded
else "$venv/bin/python" -m artifact.embedded --no-text >/dev/null; fi
# Two minutes of converting, compiling and prefilling, which the first measurement would otherwise wait for.
key=$(hash_of kernels/*.py kernels/cpu/*.py artifact/engine/*.py artifact/projection/*.py artifact/measure/warm.py)
if ! fresh warm "$key"; then
  say "converting the model, compiling the kernels and prefilling a prompt (two minutes at most)"
  "$venv/bin/python" -m artifact.measure.warm
  printf '%s' "$key" >"$(stamp_of warm)"
fi
