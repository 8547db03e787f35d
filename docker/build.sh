#!/usr/bin/env bash
# Builds the images of every service without a container daemon: docker/build.sh [SERVICE...]
# Docker works as well: docker compose -f docker/compose.yaml build
#
# Wheels are fetched by this machine's own pip into .cache/images, so that the builds themselves need no package index.
# Where the official Python and Debian images cannot be pulled, a stand-in is made from this machine's Debian mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

services=("$@")
[ ${#services[@]} -gt 0 ] || services=(registry router prefill decode etcd)

require_tools
ensure_base_images
for service in "${services[@]}"; do
  say "building headrace/$service:dev"
  [ "$service" = etcd ] || fetch_wheels "$service"
  started=$SECONDS
  buildah_ bud --isolation chroot --network host --pull-never --layers \
    --volume "$CACHE/wheels:/wheels:ro" \
    --build-arg "PIP_ARGS=--no-index --find-links /wheels" \
    --build-arg "PYTHON_IMAGE=$PYTHON_IMAGE" --build-arg "DEBIAN_IMAGE=$DEBIAN_IMAGE" \
    --tag "headrace/$service:dev" --file "docker/$service.Dockerfile" . >"$CACHE/build-$service.log" 2>&1 \
    || fail "headrace/$service:dev failed" "$CACHE/build-$service.log"
  say "headrace/$service:dev built in $((SECONDS - started)) s"
done
buildah_ images --format '{{.Name}}:{{.Tag}}  {{.Size}}'
