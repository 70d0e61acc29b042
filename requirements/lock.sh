#!/usr/bin/env bash
# Writes run.txt, test.txt, lint.txt, ray.txt, eval.txt and torch-cuda.txt from the .in files: one lock for every platform, with hashes.
# Usage: requirements/lock.sh          (needs `uv` on PATH; torch-cpu.txt is kept by hand, its index serves no other set)
set -euo pipefail
cd "$(dirname "$0")"
compile() { uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --no-annotate "$@"; }
# torch is left out of run.txt although accelerate asks for it: setup.sh installs it first, from a set of its own.
compile --override <(echo "torch ; sys_platform == 'none'") --no-emit-package torch run.in -o run.txt
echo "torch==2.13.0" | compile -c run.txt - -o torch-cuda.txt
compile -c run.txt -c torch-cuda.txt test.in -o test.txt
compile -c run.txt lint.in -o lint.txt
compile -c run.txt -c torch-cuda.txt -c test.txt ray.in -o ray.txt
compile -c run.txt -c torch-cuda.txt -c test.txt eval.in -o eval.txt
if grep -nE '://|^ *(-|/)[^ -]' ./*.txt; then echo "a lock names an index or a path" >&2; exit 1; fi
