#!/usr/bin/env bash
# Makes this checkout ready to run: Debian libraries, .venv, Python packages, stubs, console scripts.
#   scripts/setup.sh runtime    what `make demo` and `make up` need
#   scripts/setup.sh dev        that, and what `make lint`, `make docs` and `make test` need
#   scripts/setup.sh cuda       what `make test-gpu` needs, with CUDA builds of vLLM and Mooncake, in .venv-cuda
# Does again only what changed; several may run at once. Exit 2: something only you can do is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

level=${1:-runtime}
venv=.venv
case $level in
    runtime) requirement_sets=(worker router registry model build) ;;
    dev) requirement_sets=(worker router registry planner model build dev docs) ;;
    cuda) requirement_sets=(router registry planner model build dev worker-cuda) venv=.venv-cuda ;;
    *) echo "usage: scripts/setup.sh [runtime|dev|cuda]" >&2; exit 2 ;;
esac
requirement_files=("${requirement_sets[@]/#/requirements/}")
requirement_files=("${requirement_files[@]/%/.txt}")
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
free_gib_needed=6
[[ $level != cuda ]] || free_gib_needed=16
log=.cache/setup.log

# Programs that fail on a full disk may not say so.
full_disk() {
    (($(df --output=avail -k . | tail -n 1) >= 10240)) || printf ' (the disk of %s is full)' "$PWD"
}

say() { printf '[setup] %s\n' "$*"; }
refuse() { printf 'setup: %s\n' "$*" >&2; exit 2; }

# --- the machine -------------------------------------------------------------------------------

usable_python() {
    "$1" -c 'import sys, ctypes, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

# The distribution's Python comes first: images have it, and it is built with profiles. pyenv's default build is not, and
# takes 1.4 times the CPU in plain Python code.
find_python() {
    local candidate
    for candidate in ${HEADRACE_PYTHON:+"$HEADRACE_PYTHON"} /usr/bin/python3.11 python3.11 python3 python3.12 python3.13; do
        if command -v "$candidate" >/dev/null && usable_python "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
}

# Prints the Debian packages that are missing; libraries are tried by loading them, so that other
# distributions and hand-built libraries count as well.
missing_packages() {
    local python=$1
    [[ -n $python ]] || { echo python3 python3-venv; python=$(command -v python3 || true); }
    if [[ -n $python ]]; then
        "$python" - <<'PYTHON'
import ctypes

# The first three are what mooncake's engine links to and does not bring; numa is vLLM's as well.
for package, library in (
    ("libibverbs1", "libibverbs.so.1"),
    ("libcurl4", "libcurl.so.4"),
    ("libnuma1", "libnuma.so.1"),
    ("libstdc++6", "libstdc++.so.6"),
):
    try:
        ctypes.CDLL(library)
    except OSError:
        print(package)
PYTHON
    else
        echo libibverbs1 libcurl4 libnuma1 libstdc++6
    fi
    if [[ $level == cuda ]]; then
        # Mooncake for CUDA loads libmlx5, and Triton compiles.
        ldconfig -p | grep -q libmlx5.so.1 || echo ibverbs-providers
        command -v g++ >/dev/null || echo gcc g++ libc6-dev
        [[ -z $python || -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] ||
            echo libpython3-dev
    fi
    if [[ $level == dev ]]; then
        command -v etcd >/dev/null || echo etcd-server
        command -v etcdctl >/dev/null || echo etcd-client
        command -v chromium >/dev/null || echo chromium
        command -v promtool >/dev/null || echo prometheus
        command -v node >/dev/null || echo nodejs
        command -v npm >/dev/null || echo npm
        command -v gcc >/dev/null || echo gcc libc6-dev
        # They may lie where only root looks for programs.
        PATH+=:/usr/sbin:/sbin command -v ip >/dev/null || echo iproute2
        PATH+=:/usr/sbin:/sbin command -v nft >/dev/null || echo nftables
    fi
}

install_packages() {
    local packages=("$@")
    local install="apt-get install -y --no-install-recommends ${packages[*]}"
    command -v apt-get >/dev/null ||
        refuse "install what Debian calls ${packages[*]} with your system's package manager, then run this again"
    [[ $(id -u) == 0 ]] ||
        refuse "Debian packages are missing; run: sudo sh -c 'apt-get update && $install'"
    say "installing Debian packages: ${packages[*]}"
    # shellcheck disable=SC2086
    { apt-get update && DEBIAN_FRONTEND=noninteractive $install; } </dev/null >"$log" 2>&1 ||
        { tail -n 15 "$log" >&2; refuse "apt-get failed; see $log$(full_disk)"; }
}

prepare_machine() {
    local missing
    python=$(find_python)
    mapfile -t missing < <(missing_packages "$python" | tr ' ' '\n')
    if ((${#missing[@]})); then
        install_packages "${missing[@]}"
        python=$(find_python)
        [[ -n $python ]] || refuse "no Python 3.11 or newer with its venv module: set HEADRACE_PYTHON"
        mapfile -t missing < <(missing_packages "$python" | tr ' ' '\n')
        ((${#missing[@]} == 0)) || refuse "still missing after the installation: ${missing[*]}"
    fi
}

# --- the virtual environment -------------------------------------------------------------------

follow_pip() {
    local pid=$1 total=$2 started_s=$SECONDS fetched
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        (((SECONDS - started_s) % 5 == 0)) || continue
        fetched=$(sed -nE 's/^(Collecting|Requirement already satisfied:) ([^ ]+).*/\2/p' "$log" | sort -u | wc -l)
        if grep -q '^Installing collected' "$log"; then
            say "Python packages: unpacking into $venv ($((SECONDS - started_s)) s)"
        else
            say "Python packages: $fetched of $total fetched ($((SECONDS - started_s)) s)"
        fi
    done
}

# Files with the hashes in requirements/, and no others. A package without a wheel is built with the setuptools of
# build.txt. pip's isolated builds would fetch one without a hash.
install_locked() {
    "$venv/bin/python" -m pip install --require-hashes --no-deps --no-build-isolation --no-compile --progress-bar off "$@"
}

# The versions of worker-cuda.txt differ from the others in a few tools. pip refuses two versions in one call.
install_files() {
    local file
    if [[ $level != cuda ]]; then
        install_locked "${requirement_files[@]/#/--requirement=}"
        return
    fi
    for file in "${requirement_files[@]}"; do
        install_locked --requirement="$file" || return
    done
}

install_python_packages() {
    local total
    total=$(grep -hoE '^[a-z0-9][^ ]*==' "${requirement_files[@]}" | sort -u | wc -l)
    if (($(df --output=avail -k . | tail -n 1) < free_gib_needed * 1024 * 1024)); then
        refuse "the Python packages need $free_gib_needed GB of free disk here"
    fi
    say "installing $total Python packages into $venv (a few minutes the first time)"
    { install_locked --requirement=requirements/build.txt >"$log" 2>&1 &&
        install_files >"$log" 2>&1; } </dev/null &
    local pip_pid=$!
    follow_pip "$pip_pid" "$total"
    if wait "$pip_pid"; then
        say "compiling them on $(nproc) cores"
        # pip would do it on one. Packages carry files for other Pythons, which do not compile here.
        "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
        return
    fi
    tail -n 15 "$log" >&2
    if grep -q 'No matching distribution found for torch' "$log"; then
        refuse "pip's index has no CPU build of torch: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds"
    fi
    if grep -q 'DO NOT MATCH THE HASHES' "$log"; then
        refuse "a package is not the file that requirements/ states. The hash of torch is that of its build for Python 3.11:" \
            "with another Python set HEADRACE_PYTHON. Otherwise the index serves another file: install nothing from it"
    fi
    refuse "pip failed; see $log$(full_disk)"
}

prepare_environment() {
    local wanted stamp=$venv/.headrace-$level
    if [[ ! -x $venv/bin/python ]]; then
        say "creating $venv with $python"
        "$python" -m venv "$venv"
    fi
    wanted=$({ pwd; cat requirements/*.txt; } | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    [[ $level == runtime && -f .venv/.headrace-dev && $(<.venv/.headrace-dev) == "$wanted" ]] && return
    install_python_packages
    printf '%s\n' "$wanted" >"$stamp"
}

link_project() {
    local wanted stamp=$venv/.headrace-link
    wanted=$({ pwd; cat pyproject.toml scripts/link_project.py; } | sha256sum)
    [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && return
    "$venv/bin/python" scripts/link_project.py
    printf '%s\n' "$wanted" >"$stamp"
}

# --- Node, for buf and for the Node client's test ----------------------------------------------

install_node_packages() {
    local folder wanted stamp
    for folder in . tests/clients/node; do
        [[ -f $folder/package-lock.json ]] || continue
        stamp=$folder/node_modules/.headrace
        wanted=$(sha256sum <"$folder/package-lock.json")
        [[ -f $stamp && $(<"$stamp") == "$wanted" ]] && continue
        say "installing Node packages in $folder"
        # Not `npm ci`: it refuses a lock file without the platforms that an index does not carry.
        (cd "$folder" && npm install --no-save --ignore-scripts --no-audit --no-fund) </dev/null >"$log" 2>&1 ||
            { grep "npm error" "$log" | head -n 5 >&2; refuse "npm failed; see $log$(full_disk)"; }
        printf '%s\n' "$wanted" >"$stamp"
    done
}

mkdir -p .cache
exec 9>.cache/setup.lock
flock -n 9 || { say "waiting for another set-up of this checkout"; flock 9; }
started_s=$SECONDS
prepare_machine
prepare_environment
scripts/generate_stubs.sh "$venv/bin/python"
link_project
if [[ $level == dev ]]; then
    install_node_packages
    .venv/bin/python scripts/kube_tools.py </dev/null >"$log" 2>&1 || { tail -n 5 "$log" >&2; refuse "the chart's tools failed; see $log$(full_disk)"; }
fi
say "$level is ready ($((SECONDS - started_s)) s)"
