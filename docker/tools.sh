# Shared by build.sh, try.sh and tests/images: which container engine is used, where images live, and how long each step may take.
CACHE="$PWD/.cache/images"
# The base image stands in the Dockerfiles, where docker/pin.sh pins it by digest.
DEBIAN_IMAGE=${DEBIAN_IMAGE:-$(sed -n 's/^ARG DEBIAN_IMAGE=//p' docker/router.Dockerfile)}
STAND_IN_IMAGE=localhost/headrace/bookworm
# netavark, podman's network, calls iptables.
PACKAGES="buildah podman runc mmdebstrap netavark aardvark-dns catatonit uidmap iptables"
# Limits of single steps in seconds, of which the environment may change some. The longest are for slow networks and machines.
ASK_TIMEOUT_S=${ASK_TIMEOUT_S:-10}
CALL_TIMEOUT_S=${CALL_TIMEOUT_S:-60}
INSTALL_TIMEOUT_S=${INSTALL_TIMEOUT_S:-900}
FETCH_TIMEOUT_S=${FETCH_TIMEOUT_S:-1800}
BUILD_TIMEOUT_S=${BUILD_TIMEOUT_S:-1800}
mkdir -p "$CACHE/run"

say() { printf '%s\n' "$*" >&2; }

# Prints the end of the step's log and exits.
fail() {
  [ ! -e "$2" ] || tail -n 20 "$2" >&2
  say "$1: see $2"
  exit 1
}

# An engine without a daemon gets a folder of its own, so nothing of it is outside .cache. It sets no cgroup or ulimit that an
# unprivileged root lacks.
STORAGE=(--root "$CACHE/storage" --runroot "$CACHE/run" --storage-driver overlay)
configure_podman() {
  cat >"$CACHE/containers.conf" <<CONF
[containers]
default_ulimits = ["nofile=8192:8192", "nproc=8192:8192"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
  export CONTAINERS_CONF="$CACHE/containers.conf"
}

# Sets ENGINE to docker, where its daemon answers, else to podman. HEADRACE_CONTAINER_ENGINE overrides the choice. $CACHE/engine
# calls it, for compose and tests.
choose_engine() {
  local call="docker" timers=""
  ENGINE=${HEADRACE_CONTAINER_ENGINE:-}
  if [ -z "$ENGINE" ]; then
    ENGINE=podman
    if command -v docker >/dev/null && timeout "$ASK_TIMEOUT_S" docker info >/dev/null 2>&1; then ENGINE=docker; fi
  fi
  case $ENGINE in
    docker) ;;
    podman)
      require_podman
      configure_podman
      # podman runs health checks by timers of systemd, and starts no container if it cannot make one.
      [ -d /run/systemd/system ] || timers="DISABLE_HC_SYSTEMD=true"
      call="env PATH=${PATH@Q} CONTAINERS_CONF=${CONTAINERS_CONF@Q} $timers podman ${STORAGE[*]@Q}"
      ;;
    *) say "HEADRACE_CONTAINER_ENGINE is $ENGINE: set it to docker or podman, or leave it empty"; exit 2 ;;
  esac
  printf '#!/bin/sh\nexec %s "$@"\n' "$call" >"$CACHE/engine.$$"
  chmod +x "$CACHE/engine.$$"
  mv "$CACHE/engine.$$" "$CACHE/engine"
}

# Calls the engine with a limit of $1 seconds.
engine() { timeout --kill-after=10 "$1" "$CACHE/engine" "${@:2}"; }

require_podman() {
  export PATH=$PATH:/usr/sbin:/sbin
  local program missing=""
  for program in podman mmdebstrap iptables runc; do
    command -v "$program" >/dev/null || missing+=" $program"
  done
  [ -n "$missing" ] || return 0
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "not installed:$missing. Installing $PACKAGES"
    # shellcheck disable=SC2086
    timeout "$INSTALL_TIMEOUT_S" sh -c "apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
      apt-get install -y -qq --no-install-recommends $PACKAGES" </dev/null >"$CACHE/apt.log" 2>&1 \
      || fail "apt-get failed, or took more than $INSTALL_TIMEOUT_S s" "$CACHE/apt.log"
  else
    say "not installed:$missing. Run: sudo apt-get install -y --no-install-recommends $PACKAGES"
    exit 2
  fi
}

# Pulls the base image and sets DEBIAN_IMAGE to its name with its digest. Or makes a stand-in with the packages of this machine's
# Debian mirror and without their documents, as debian:bookworm-slim is made.
ensure_base_image() {
  if engine "$CALL_TIMEOUT_S" pull --quiet "$DEBIAN_IMAGE" >"$CACHE/pull.log" 2>&1; then
    [[ $DEBIAN_IMAGE == *@sha256:* ]] || say "$DEBIAN_IMAGE is not pinned: docker/pin.sh writes its digest into the Dockerfiles"
    local digest
    digest=$(engine "$CALL_TIMEOUT_S" image inspect --format '{{index .RepoDigests 0}}' "$DEBIAN_IMAGE" 2>"$CACHE/pull.log") \
      && [[ ${digest##*@} =~ ^sha256:[0-9a-f]{64}$ ]] || fail "$DEBIAN_IMAGE has no digest" "$CACHE/pull.log"
    DEBIAN_IMAGE=${DEBIAN_IMAGE%@*}@${digest##*@}
    return
  fi
  say "$DEBIAN_IMAGE cannot be pulled ($CACHE/pull.log): using a stand-in from this machine's Debian mirror"
  DEBIAN_IMAGE=$STAND_IN_IMAGE
  engine "$CALL_TIMEOUT_S" image inspect "$STAND_IN_IMAGE" >/dev/null 2>&1 && return
  command -v mmdebstrap >/dev/null || { say "mmdebstrap is not installed: apt-get install mmdebstrap"; exit 2; }
  if [ ! -s "$CACHE/rootfs.tar" ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -e "$sources" ] || sources=/etc/apt/sources.list
    # usrmerge would bring all of Perl. Debian's own images have usr-is-merged instead.
    timeout "$INSTALL_TIMEOUT_S" mmdebstrap --quiet --variant=minbase --include=ca-certificates \
      --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
      --setup-hook='mkdir -p "$1/etc/apt/preferences.d"' \
      --setup-hook='printf "Package: usrmerge\nPin: release *\nPin-Priority: -1\n" >"$1/etc/apt/preferences.d/usrmerge"' \
      --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
      --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/info/*' \
      --dpkgopt='path-exclude=/usr/share/locale/*' \
      bookworm "$CACHE/rootfs.part.tar" "$sources" </dev/null >"$CACHE/rootfs.log" 2>&1 \
      || fail "mmdebstrap failed, or took more than $INSTALL_TIMEOUT_S s" "$CACHE/rootfs.log"
    mv "$CACHE/rootfs.part.tar" "$CACHE/rootfs.tar"
  fi
  engine "$BUILD_TIMEOUT_S" import "$CACHE/rootfs.tar" "$STAND_IN_IMAGE" >"$CACHE/import.log" 2>&1 \
    || fail "the stand-in cannot be imported" "$CACHE/import.log"
}

# The lock file that an image installs. $1: a service, or a worker with -sim or -cuda.
requirements_of() {
  case $1 in
    *-sim) echo sim ;;
    *-cuda) echo worker-cuda ;;
    prefill | decode | worker) echo worker ;;
    *) echo "$1" ;;
  esac
}

# The name of an image: headrace/SERVICE:dev, or :sim and :cuda for these workers.
tag_of() {
  case $1 in
    *-sim | *-cuda) echo "headrace/${1%-*}:${1##*-}" ;;
    *) echo "headrace/$1:dev" ;;
  esac
}

# The files that an image installs, as this machine's pip finds them: in wheels/$1, because pip would take torch+cpu of another
# folder for torch. pip accepts only the files whose hashes are in requirements/, here and in the build. Source is not built here,
# so setuptools of .venv only reads its metadata.
fetch_wheels() {
  local requirements="requirements/$1.txt" folder="$CACHE/wheels/$1" file stamp
  stamp="$folder/.$(cat "$requirements" requirements/build.txt | sha256sum | cut -c1-16)"
  [ -e "$stamp" ] && return
  say "fetching the wheels of $requirements"
  mkdir -p "$folder"
  # One call for each file: worker-cuda.txt has another setuptools than build.txt.
  for file in "$requirements" requirements/build.txt; do
    timeout "$FETCH_TIMEOUT_S" "${PYTHON:-.venv/bin/python}" -m pip download --quiet --no-deps --require-hashes \
      --no-build-isolation --dest "$folder" -r "$file" </dev/null >"$CACHE/wheels.log" 2>&1 \
      || fail "pip could not fetch the wheels of $file within $FETCH_TIMEOUT_S s" "$CACHE/wheels.log"
  done
  touch "$stamp"
}
