#!/usr/bin/env bash
# Builds the image from the unmodified Dockerfile and runs it as its documentation says, without a network.
# Where no engine can run it says why and exits 0. Usage: docker/test_image.sh
# IMAGE: the tag to build. IMAGE_VERIFY: what is measured inside; all claims in quick form unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
image=${IMAGE:-artifact}
work=$(mktemp -d)
started=
finish() { rm -rf "$work"; if [ -n "$started" ]; then bash docker/engine.sh stop; fi; }
trap finish EXIT

say() { printf 'image: %s\n' "$*"; }
skip() { say "SKIPPED: $*"; exit 0; }
fail() { say "FAILED: $*"; exit 1; }

# --- an engine and a base image
if ! docker info >/dev/null 2>&1; then
  [ "$(id -u)" = 0 ] || skip "no Docker engine answers and starting one needs root"
  if ! command -v dockerd >/dev/null || ! command -v debootstrap >/dev/null; then
    { apt-get update -qq && apt-get install -y -qq --no-install-recommends docker.io debootstrap; } >"$work/apt" 2>&1 ||
      skip "no Docker engine answers and none could be installed ($(tail -n 1 "$work/apt"))"
  fi
  bash docker/engine.sh start 2>"$work/engine" || skip "the Docker engine does not start ($(tail -n 1 "$work/engine"))"
  started=yes
fi
base=$(sed -n 's/^ARG BASE_IMAGE=//p' Dockerfile)
tag=${base%%@*}
if ! docker image inspect "$tag" >/dev/null 2>&1 && ! timeout 60 docker pull -q "$tag" >/dev/null 2>&1; then
  say "no registry serves $tag here: building on a stand-in made from Debian's packages"
  bash docker/standin.sh "$work/base.tar" >"$work/standin" 2>&1 || { tail -n 5 "$work/standin"; fail "no base image"; }
  docker import -c 'CMD ["bash"]' "$work/base.tar" "$tag" >/dev/null
  rm -f "$work/base.tar"
fi

# --- build
build() {
  docker build -t "$image" --build-arg BASE_IMAGE="$tag" --build-arg COMMIT="$(git rev-parse HEAD 2>/dev/null || true)" \
    "$1" >"$work/build" 2>&1 || { tail -n 40 "$work/build"; fail "docker build"; }
}
begun=$SECONDS
build .
say "built in $((SECONDS - begun)) s, $(docker image inspect -f '{{.Size}}' "$image" | awk '{printf "%.2f GB", $1 / 1e9}')"

mkdir "$work/context"
tar -c --exclude=./.git --exclude=./.venv --exclude=./.cache --exclude=./runs --exclude=./results . | tar -x -C "$work/context"
printf '\n' >>"$work/context/artifact/cli.py"
begun=$SECONDS
build "$work/context"
took=$((SECONDS - begun))
say "rebuilt after a source edit in $took s"
[ "$took" -lt 60 ] || fail "a source edit takes $took s to rebuild: a heavy layer comes after the source"
build .

# --- run; every command without a network
run() { docker run --rm --network none "$@"; }
expect() { # expect CODES COMMAND...: runs it, shows its end, and fails unless its exit code is one of CODES
  local codes=$1 code=0
  shift
  "$@" >"$work/out" 2>&1 || code=$?
  case " $codes " in
    *" $code "*) say "exit $code as expected: ${*:2}" ;;
    *) tail -n 40 "$work/out"; fail "exit $code, expected $codes: ${*:2}" ;;
  esac
}
shows() { grep -q -e "$1" "$work/out" || { tail -n 40 "$work/out"; fail "its output lacks '$1'"; }; }

expect 0 run "$image"
shows verify-all
expect 2 run "$image" no-such-command
expect 0 run --read-only --tmpfs /tmp "$image" tables # without a run: the recorded ones
shows "fromrecorded{"
expect 0 run "$image" selftest
shows '"unnoticed":\[\]'
expect 0 run --entrypoint sh "$image" -c '[ "$(id -u)" != 0 ] && [ ! -w /opt/artifact ] && [ ! -w /opt/data ]'
mkdir -m 777 "$work/results"
locked=(--read-only --tmpfs /tmp -v "$work/results:/results")
expect 0 run "${locked[@]}" "$image" verify byte_account --run byte
shows "no GPU here"
expect 0 run "${locked[@]}" "$image" tables byte
cp -r "$work/results/byte/tables" "$work/first"
expect 0 run "${locked[@]}" "$image" tables byte
diff -r "$work/first" "$work/results/byte/tables" || fail "the tables of a run differ when rendered again"
expect 2 run --read-only --tmpfs /tmp "$image" verify byte_account
shows "results cannot be written"
# The main claim by its own name, as the first command of the documentation.
if [ -z "${IMAGE_VERIFY:-}" ]; then expect "0 1 3" run "${locked[@]}" "$image" verify crossover --quick; fi
# What a claim finds about this machine is no fault of the image; a usage error or an error of ours is.
read -ra words <<<"${IMAGE_VERIFY:-verify-all --quick}"
expect "0 1 3" run "${locked[@]}" "$image" "${words[@]}"
tail -n 25 "$work/out"
say "passed"
