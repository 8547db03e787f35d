#!/usr/bin/env bash
# Builds images: docker/build.sh [IMAGE...], where IMAGE is registry, router, planner, prefill, decode, worker or etcd, or one of the
# three workers with -sim (the simulated engine) or -cuda.
#
# docker builds them where its daemon answers, else buildah or podman, which need none. Each step has a limit. Without docker,
# wheels are fetched by this machine's own pip into .cache/images, so that the builds themselves need no package index.
# Where the base image cannot be pulled, a stand-in is made from this machine's Debian mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

images=("$@")
[ ${#images[@]} -gt 0 ] || images=(registry router planner prefill decode worker etcd)
for image in "${images[@]}"; do
  [ -e "docker/${image%-*}.Dockerfile" ] || { say "there is no image $image: name one of docker/*.Dockerfile"; exit 2; }
done

choose_engine
ensure_base_image
# HEALTHCHECK is in docker's format of images only.
if [ "$ENGINE" = docker ]; then
  build=(docker build --network host)
elif command -v buildah >/dev/null; then
  build=(buildah "${STORAGE[@]}" bud --isolation chroot --format docker --layers --pull-never --network host)
else
  build=(podman "${STORAGE[@]}" build --format docker --layers --pull=never --network host)
fi
revision=$(git rev-parse --short=12 HEAD 2>/dev/null || true)

for image in "${images[@]}"; do
  tag=$(tag_of "$image")
  requirements=$(requirements_of "$image")
  say "building $tag with ${build[0]}"
  arguments=(--build-arg "DEBIAN_IMAGE=$DEBIAN_IMAGE")
  if [ "$image" != etcd ]; then
    if [ "$ENGINE" = podman ]; then
      fetch_wheels "$requirements"
      arguments+=(--volume "$CACHE/wheels/$requirements:/wheels:ro" --build-arg "PIP_ARGS=--no-index --find-links /wheels")
    fi
    arguments+=(--build-arg "REQUIREMENTS=$requirements" --build-arg "REVISION=$revision")
  fi
  started=$SECONDS
  timeout --kill-after=10 "$BUILD_TIMEOUT_S" "${build[@]}" "${arguments[@]}" \
    --label "org.opencontainers.image.base.name=${DEBIAN_IMAGE%@*}" \
    --label "org.opencontainers.image.base.digest=$(grep -o 'sha256:.*' <<<"$DEBIAN_IMAGE" || true)" \
    --tag "$tag" --file "docker/${image%-*}.Dockerfile" . </dev/null >"$CACHE/build-$image.log" 2>&1 \
    || fail "$tag failed, or took more than $BUILD_TIMEOUT_S s" "$CACHE/build-$image.log"
  say "$tag built in $((SECONDS - started)) s"
done
engine "$CALL_TIMEOUT_S" images --format '{{.Repository}}:{{.Tag}}  {{.Size}}' | grep headrace/
