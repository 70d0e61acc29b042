#!/bin/sh
# What `docker run` starts: the `artifact` command, after saying what this container lacks for the verb at hand.
set -eu

say() { printf 'container: %s\n' "$*" >&2; }

can_write() { probe="$1/.probe-$$"; (mkdir -p "$1" && : >"$probe") 2>/dev/null && rm -f "$probe"; }

# What the image brought along is read-only; what is derived from it goes beside links to it.
data=${ARTIFACT_DATA:-/tmp/data}
if mkdir -p "$data" 2>/dev/null && [ -w "$data" ]; then
  for part in "${BAKED_DATA:-/opt/data}"/*; do
    [ ! -e "$part" ] || [ -e "$data/${part##*/}" ] || ln -s "$part" "$data/"
  done
fi

case "${1:-}" in
  verify | verify-all | bench | campaign)
    can_write /tmp || { say "nothing can be written to /tmp: add --tmpfs /tmp to docker run."; exit 2; }
    can_write "${ARTIFACT_RUNS:-runs}" || {
      say "results cannot be written to ${ARTIFACT_RUNS:-runs}: mount a folder this user ($(id -u)) may write, as in" \
        "-v \"\$PWD/results:/results\" --user \"\$(id -u):\$(id -g)\"."
      exit 2
    }
    if [ ! -e "${NVIDIA_NODE:-/dev/nvidiactl}" ]; then
      say "no GPU here (docker run --gpus all gives one): the default profile is 'embedded', on the CPU."
    fi
    ;;
esac
exec artifact "$@"
