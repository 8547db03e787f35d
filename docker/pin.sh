#!/usr/bin/env bash
# Pins the base image: writes the digest that its registry gives for its tag now into the Dockerfiles: docker/pin.sh
# Needs skopeo and a registry. Commit what it writes. A later run takes the tag's newer image.
set -euo pipefail
cd "$(dirname "$0")"
TIMEOUT_S=60

for argument in DEBIAN_IMAGE; do
  image=$(sed -n "s/^ARG $argument=//p" ./*.Dockerfile | sort -u)
  tag=${image%@*}
  digest=$(timeout "$TIMEOUT_S" skopeo inspect --no-tags --format '{{.Digest}}' "docker://$tag")
  [[ $digest =~ ^sha256:[0-9a-f]{64}$ ]] || { printf 'pin: no digest of %s: %s\n' "$tag" "$digest" >&2; exit 1; }
  sed -i "s|^ARG $argument=.*|ARG $argument=$tag@$digest|" ./*.Dockerfile
  printf 'pinned %s@%s\n' "$tag" "$digest"
done
