#!/usr/bin/env bash
# Makes what the RDMA test's virtual machine boots, in .cache/rdma: a kernel with soft-RoCE and a small Debian with the
# Python packages of the services. Does again only what changed.
#   scripts/rdma_vm_image.sh PYTHON     PYTHON: the interpreter whose installed packages the machine gets
# Exit 0: `vmlinuz` and `root.cpio` are there. Exit 3: QEMU cannot be installed here. Other: something failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$1
cache=$PWD/.cache/rdma
log=$cache/image.log
cannot_install=3
tools=(qemu-system-x86_64 mmdebstrap cpio depmod)
tool_packages=(qemu-system-x86 mmdebstrap cpio kmod)
guest_packages=(
    python3 libibverbs1 librdmacm1 ibverbs-providers rdma-core iproute2 libnuma1 libgomp1 libcurl4 libstdc++6 kmod
)
# Everything that soft-RoCE, its two kinds of network device and their helpers need.
module_folders=(
    arch/x86/crypto crypto lib drivers/infiniband/core drivers/infiniband/sw drivers/virtio drivers/net/dummy.ko
    drivers/net/virtio_net.ko drivers/net/net_failover.ko net/core net/ipv4 net/ipv6
)

say() { printf '[rdma] %s\n' "$*"; }
fail() { printf 'rdma: %s\n' "$*" >&2; tail -n 15 "$log" >&2; exit 1; }

missing_tools() {
    local tool
    for tool in "${tools[@]}"; do
        PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || echo "$tool"
    done
}

install_tools() {
    local missing
    missing=$(missing_tools | tr '\n' ' ')
    [[ -z $missing ]] && return
    if ! command -v apt-get >/dev/null || [[ $(id -u) != 0 ]]; then
        say "missing: $missing; as root on Debian: apt-get install ${tool_packages[*]}"
        exit "$cannot_install"
    fi
    say "installing Debian packages: ${tool_packages[*]}"
    if ! { apt-get update && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${tool_packages[@]}"; } </dev/null >"$log" 2>&1; then
        tail -n 15 "$log" >&2
        say "apt-get could not install them: no network?"
        exit "$cannot_install"
    fi
}

# Prints the code name and the mirror of the Debian release that this machine itself uses.
own_release() {
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(LABEL) $(REPO_URI)' 'Created-By: Packages' |
        awk '$2 == "main" && $3 == "Debian" && $1 !~ /-/ { print $1, $4; exit }'
}

fetch_kernel() {
    local work=$1 package
    apt-get update </dev/null >>"$log" 2>&1 || fail "apt-get update failed"
    package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ { print $2; exit }')
    [[ -n $package ]] || fail "apt knows no linux-image-amd64: the test needs Debian's own kernel"
    mkdir -p "$work/kernel"
    (cd "$work" && apt-get download -o APT::Sandbox::User=root "$package" </dev/null >>"$log" 2>&1) ||
        fail "the kernel package $package could not be fetched"
    dpkg -x "$work"/linux-image-*.deb "$work/kernel"
    cp "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
}

build_root() {
    local work=$1 root=$1/root release codename mirror version folder
    release=$(own_release)
    [[ -n $release ]] || fail "apt has no Debian source: the test's machine is built from this machine's own"
    read -r codename mirror <<<"$release"
    mmdebstrap --variant=minbase --components=main "--include=$(IFS=,; echo "${guest_packages[*]}")" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' --dpkgopt='path-exclude=/usr/share/zoneinfo/*' \
        "$codename" "$root" "$mirror" </dev/null >>"$log" 2>&1 || fail "mmdebstrap failed; see $log"
    version=$(basename "$work"/kernel/lib/modules/*)
    for folder in "${module_folders[@]}"; do
        mkdir -p "$root/lib/modules/$version/kernel/$(dirname "$folder")"
        cp -r "$work/kernel/lib/modules/$version/kernel/$folder" "$root/lib/modules/$version/kernel/$(dirname "$folder")/"
    done
    cp "$work/kernel/lib/modules/$version"/modules.{builtin,order}* "$root/lib/modules/$version/"
    PATH=$PATH:/usr/sbin:/sbin depmod -b "$root" "$version"
    "$python" scripts/rdma_vm_packages.py "$root/opt/python"
    PYTHONPATH=/opt/python chroot "$root" python3 - <<'PYTHON' >>"$log" 2>&1 || fail "the machine's Python cannot use .venv's packages"
import compileall, sys
import grpc, mooncake.engine, numpy, pydantic, uvloop
compileall.compile_dir("/usr/lib/python3.%d" % sys.version_info[1], quiet=2)
compileall.compile_dir("/opt/python", quiet=2)
PYTHON
    rm -rf "$root"/var/{lib,cache}/apt "$root"/var/log/* "$root"/usr/share/{locale,doc,man,zoneinfo} "$root/boot"
    (cd "$root" && find . -xdev -path ./proc -prune -o -path ./sys -prune -o -print0 |
        cpio --null --quiet -o -H newc) >"$work/root.cpio"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
install_tools
wanted=$({ cat scripts/rdma_vm_image.sh scripts/rdma_vm_packages.py requirements/*.txt; "$python" -V; } | sha256sum)
if [[ -f $cache/stamp && $(<"$cache/stamp") == "$wanted" && -s $cache/vmlinuz && -s $cache/root.cpio ]]; then
    exit 0
fi
if [[ $(id -u) != 0 ]]; then
    say "only root can build the virtual machine's file system"
    exit "$cannot_install"
fi
started_s=$SECONDS
: >"$log"
say "building the virtual machine's kernel and file system (a minute)"
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
fetch_kernel "$work"
build_root "$work"
rm -f "$cache/stamp"
mv "$work/vmlinuz" "$work/root.cpio" "$cache/"
printf '%s\n' "$wanted" >"$cache/stamp"
say "built in $((SECONDS - started_s)) s: $(du -h "$cache/root.cpio" | cut -f 1)"
