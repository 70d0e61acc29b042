#!/usr/bin/env bash
# Writes a root file system of Debian bookworm that stands in for the base image where no image registry is reachable.
# Package sources, extra certificates and local wheels are those this machine is set up with.
# Usage: docker/standin.sh OUT.tar        (root; needs debootstrap)
set -euo pipefail
out=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
[ -n "$mirror" ] || { echo "apt on this machine has no source for Debian bookworm" >&2; exit 1; }
debootstrap --variant=minbase bookworm "$root" "$mirror" >&2
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/log/* \
  "$root"/usr/share/{doc,man,info,locale}/* "$root"/etc/{resolv.conf,hostname} "$root"/etc/apt/sources.list
cp /etc/apt/sources.list.d/*.sources "$root/etc/apt/sources.list.d/"
for certificate in /usr/local/share/ca-certificates/*.crt; do
  [ -e "$certificate" ] || continue
  install -D -m 644 -t "$root/usr/local/share/ca-certificates" "$certificate"
done
# As in the published image: no package archives, caches or documentation are kept.
printf '%s\n' 'DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };' \
  'Dir::Cache::pkgcache ""; Dir::Cache::srcpkgcache "";' >"$root/etc/apt/apt.conf.d/docker-clean"
printf 'path-exclude /usr/share/%s/*\n' doc man info locale >"$root/etc/dpkg/dpkg.cfg.d/docker"
for wheel in ${PIP_FIND_LINKS:+"$PIP_FIND_LINKS"/torch-*+cpu-*.whl}; do
  [ -e "$wheel" ] || continue
  install -D -m 644 -t "$root/srv/wheels" "$wheel"
  printf '[global]\nfind-links = /srv/wheels\n' >"$root/etc/pip.conf"
done
tar -C "$root" --numeric-owner --sort=name -cf "$out" .
