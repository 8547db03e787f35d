# Shared by build.sh and try.sh: where images live, and how buildah and podman are called without a daemon.
CACHE="$PWD/.cache/images"
# The base images stand in the Dockerfiles, where docker/pin.sh pins them by digest.
PYTHON_IMAGE=${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' docker/router.Dockerfile)}
DEBIAN_IMAGE=${DEBIAN_IMAGE:-$(sed -n 's/^ARG DEBIAN_IMAGE=//p' docker/etcd.Dockerfile)}
STAND_IN_IMAGE=localhost/headrace/bookworm
# netavark, podman's network, calls iptables.
PACKAGES="buildah podman runc mmdebstrap netavark aardvark-dns catatonit uidmap iptables"
# Limits of single steps. The longest are for slow networks and machines.
PULL_TIMEOUT_S=60
INSTALL_TIMEOUT_S=900
FETCH_TIMEOUT_S=1800
BUILD_TIMEOUT_S=1800
mkdir -p "$CACHE/wheels" "$CACHE/run"

say() { printf '%s\n' "$*" >&2; }

# A container engine of our own: nothing of it outside .cache, and no cgroup or ulimit that an unprivileged root lacks.
cat >"$CACHE/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
export CONTAINERS_CONF="$CACHE/containers.conf"
STORAGE=(--root "$CACHE/storage" --runroot "$CACHE/run" --storage-driver overlay)
buildah_() { timeout "$BUILD_TIMEOUT_S" buildah "${STORAGE[@]}" "$@"; }
podman_() { timeout "$PULL_TIMEOUT_S" podman "${STORAGE[@]}" "$@"; }

# Prints the end of the step's log and exits.
fail() {
  tail -n 20 "$2" >&2 || true
  say "$1: see $2"
  exit 1
}

require_tools() {
  export PATH=$PATH:/usr/sbin:/sbin
  command -v buildah >/dev/null && command -v podman >/dev/null && command -v mmdebstrap >/dev/null \
    && command -v iptables >/dev/null && return
  if [ "$(id -u)" = 0 ]; then
    say "installing $PACKAGES"
    # shellcheck disable=SC2086
    timeout "$INSTALL_TIMEOUT_S" sh -c "apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends $PACKAGES" </dev/null >"$CACHE/apt.log" 2>&1 \
      || fail "apt-get failed" "$CACHE/apt.log"
  else
    say "containers need some Debian packages; run: sudo apt-get install -y --no-install-recommends $PACKAGES"
    exit 2
  fi
}

ensure_base_images() {
  local image
  if podman_ pull --quiet "$PYTHON_IMAGE" >/dev/null 2>&1 && podman_ pull --quiet "$DEBIAN_IMAGE" >/dev/null 2>&1; then
    for image in "$PYTHON_IMAGE" "$DEBIAN_IMAGE"; do
      [[ $image == *@sha256:* ]] || say "$image is not pinned: docker/pin.sh writes its digest into the Dockerfiles"
    done
    return
  fi
  say "the base images cannot be pulled: using a stand-in from this machine's Debian mirror"
  PYTHON_IMAGE=$STAND_IN_IMAGE DEBIAN_IMAGE=$STAND_IN_IMAGE
  buildah_ inspect --type image "$STAND_IN_IMAGE" >/dev/null 2>&1 && return
  if [ ! -s "$CACHE/rootfs.tar" ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    timeout "$INSTALL_TIMEOUT_S" mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
      bookworm "$CACHE/rootfs.part.tar" "$sources" >"$CACHE/rootfs.log" 2>&1 || fail "mmdebstrap failed" "$CACHE/rootfs.log"
    mv "$CACHE/rootfs.part.tar" "$CACHE/rootfs.tar"
  fi
  local container
  container=$(buildah_ from scratch)
  buildah_ add --quiet "$container" "$CACHE/rootfs.tar" / >/dev/null
  buildah_ run --isolation chroot "$container" -- sh -c \
    'ln -sf /usr/bin/python3 /usr/local/bin/python; rm -f /usr/lib/python3*/EXTERNALLY-MANAGED'
  buildah_ commit --quiet "$container" "$STAND_IN_IMAGE" >/dev/null
  buildah_ rm "$container" >/dev/null
}

# The files that a service's image installs, as this machine's pip finds them. pip accepts only the files whose hashes are
# in requirements/, here and in the build. Source is not built here, so setuptools of .venv only reads its metadata.
fetch_wheels() {
  local requirements="requirements/worker.txt"
  [ -e "requirements/$1.txt" ] && requirements="requirements/$1.txt"
  local stamp="$CACHE/wheels/.$(basename "$requirements").$(cat "$requirements" requirements/build.txt | sha256sum | cut -c1-16)"
  [ -e "$stamp" ] && return
  say "fetching the wheels of $requirements"
  timeout "$FETCH_TIMEOUT_S" "${PYTHON:-.venv/bin/python}" -m pip download --quiet --no-deps --require-hashes --no-build-isolation \
    --dest "$CACHE/wheels" -r "$requirements" -r requirements/build.txt >"$CACHE/wheels.log" 2>&1 \
    || fail "pip could not fetch the wheels" "$CACHE/wheels.log"
  touch "$stamp"
}
