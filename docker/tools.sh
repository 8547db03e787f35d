# Shared by build.sh and try.sh: where images live, and how buildah and podman are called without a daemon.
CACHE="$PWD/.cache/images"
PYTHON_IMAGE=${PYTHON_IMAGE:-docker.io/library/python:3.11-slim-bookworm}
DEBIAN_IMAGE=${DEBIAN_IMAGE:-docker.io/library/debian:bookworm-slim}
PACKAGES="buildah podman runc mmdebstrap netavark aardvark-dns catatonit uidmap"
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
buildah_() { buildah "${STORAGE[@]}" "$@"; }
podman_() { podman "${STORAGE[@]}" "$@"; }

require_tools() {
  command -v buildah >/dev/null && command -v podman >/dev/null && command -v mmdebstrap >/dev/null && return
  if [ "$(id -u)" = 0 ]; then
    say "installing $PACKAGES"
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES >"$CACHE/apt.log" 2>&1
  else
    say "containers need some Debian packages; run: sudo apt-get install -y --no-install-recommends $PACKAGES"
    exit 2
  fi
}

ensure_base_images() {
  buildah_ inspect --type image "$PYTHON_IMAGE" >/dev/null 2>&1 \
    && buildah_ inspect --type image "$DEBIAN_IMAGE" >/dev/null 2>&1 && return
  if timeout 60 podman_ pull --quiet "$PYTHON_IMAGE" >/dev/null 2>&1 && timeout 60 podman_ pull --quiet "$DEBIAN_IMAGE" >/dev/null 2>&1; then
    return
  fi
  say "the official base images cannot be pulled: making a stand-in from this machine's Debian mirror"
  if [ ! -s "$CACHE/rootfs.tar" ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
      bookworm "$CACHE/rootfs.part.tar" "$sources"
    mv "$CACHE/rootfs.part.tar" "$CACHE/rootfs.tar"
  fi
  local container
  container=$(buildah_ from scratch)
  buildah_ add --quiet "$container" "$CACHE/rootfs.tar" / >/dev/null
  buildah_ run --isolation chroot "$container" -- sh -c \
    'ln -sf /usr/bin/python3 /usr/local/bin/python; rm -f /usr/lib/python3*/EXTERNALLY-MANAGED'
  buildah_ commit --quiet "$container" "$PYTHON_IMAGE" >/dev/null
  buildah_ rm "$container" >/dev/null
  buildah_ tag "$PYTHON_IMAGE" "$DEBIAN_IMAGE"
}

# The wheels that a service's image installs, as this machine's pip finds them.
fetch_wheels() {
  local requirements="requirements/worker.txt"
  [ -e "requirements/$1.txt" ] && requirements="requirements/$1.txt"
  local stamp="$CACHE/wheels/.$(basename "$requirements").$(sha256sum "$requirements" requirements/build.txt | sha256sum | cut -c1-16)"
  [ -e "$stamp" ] && return
  say "fetching the wheels of $requirements"
  "${PIP:-.venv/bin/pip}" wheel --quiet --no-deps --wheel-dir "$CACHE/wheels" -r "$requirements" -r requirements/build.txt
  touch "$stamp"
}
