#!/usr/bin/env bash
# Starts or stops a Docker engine where none is managed by the system (a CI machine).
# Usage: docker/engine.sh start | stop
set -euo pipefail
pidfile=/var/run/docker.pid
log=${TMPDIR:-/tmp}/dockerd.log
case ${1:-} in
  start)
    docker info >/dev/null 2>&1 && exit 0
    setsid dockerd --mtu 1400 --pidfile "$pidfile" >"$log" 2>&1 </dev/null &
    for _ in $(seq 60); do
      docker info >/dev/null 2>&1 && exit 0
      sleep 0.5
    done
    tail -n 20 "$log" >&2
    exit 1
    ;;
  stop)
    [ -s "$pidfile" ] || exit 0
    kill "$(cat "$pidfile")"
    for _ in $(seq 60); do
      [ -e "$pidfile" ] || exit 0
      sleep 0.5
    done
    exit 1
    ;;
  *) echo "usage: $0 start | stop" >&2; exit 2 ;;
esac
