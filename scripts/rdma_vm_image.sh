#!/usr/bin/env bash
# Makes what the RDMA test's virtual machines boot, in .cache/rdma: a kernel with soft-RoCE and a small Debian with the
# Python packages of the services. Needs root only to install QEMU. Does again only what changed.
#   scripts/rdma_vm_image.sh PYTHON     PYTHON: the interpreter whose installed packages the machines get
# Exit 0: `vmlinuz` and `root.cpio` are there. Exit 3: QEMU or the Debian packages cannot be had here, and the last line
# on stdout says why. Other: something failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$PATH:/usr/sbin:/sbin LC_ALL=C

python=$1
cache=$PWD/.cache/rdma
log=$cache/image.log
cannot_have=3
tools=(qemu-system-x86_64 depmod)
tool_packages=(qemu-system-x86 kmod)
kernel_package=linux-image-amd64
guest_packages=(
    bash coreutils mount grep kmod iproute2 python3 util-linux
    libibverbs1 librdmacm1 ibverbs-providers libnuma1 libgomp1 libcurl4 libstdc++6
)
# What those depend on for being installed, not for being run.
not_unpacked='^(adduser|debconf|dpkg|init-system-helpers|lib[a-z-]*-perl|libpam-.*|libperl.*|lsb-base|passwd|perl.*|sysvinit-utils|tar|udev|usrmerge)_'
not_copied=(
    boot usr/share/{doc,info,locale,man,lintian,bash-completion,perl*} usr/lib/x86_64-linux-gnu/{gconv,perl*}
    usr/lib/python3.*/{config-*,distutils,ensurepip,idlelib,lib2to3,pydoc_data,test,tkinter,turtledemo,unittest}
)
# Everything that soft-RoCE, its two kinds of network device, folders of the host and their helpers need.
module_folders=(
    arch/x86/crypto crypto lib drivers/infiniband/core drivers/infiniband/sw drivers/virtio drivers/net/dummy.ko
    drivers/net/virtio_net.ko drivers/net/net_failover.ko net/core net/ipv4 net/ipv6
    fs/9p fs/fscache fs/netfs net/9p
)

say() { printf '[rdma] %s\n' "$*"; }
fail() { tail -n 15 "$log" >&2; printf 'rdma: %s\n' "$*" >&2; exit 1; }
refuse() { [[ ! -s $log ]] || tail -n 5 "$log" >&2; say "$*"; exit "$cannot_have"; }

missing_tools() {
    local tool
    for tool in "${tools[@]}"; do
        command -v "$tool" >/dev/null || echo "$tool"
    done
}

install_tools() {
    local missing
    missing=$(missing_tools | tr '\n' ' ')
    [[ -n $missing ]] || return 0
    command -v apt-get >/dev/null || refuse "missing: ${missing% }, and this is no Debian; install QEMU and kmod"
    [[ $(id -u) == 0 ]] || refuse "missing: ${missing% }; as root: apt-get install ${tool_packages[*]}"
    say "installing Debian packages: ${tool_packages[*]}"
    { apt-get update && DEBIAN_FRONTEND=noninteractive \
        apt-get install -y --no-install-recommends "${tool_packages[@]}"; } </dev/null >>"$log" 2>&1 ||
        refuse "apt-get could not install ${tool_packages[*]}: no network?"
    missing=$(missing_tools | tr '\n' ' ')
    [[ -z $missing ]] || fail "still missing after the installation: $missing"
}

# Into $1/debs: the kernel, and the guest's packages with all that they depend on, as if nothing were installed.
fetch_packages() {
    local work=$1 kernel
    local apt=(-o APT::Sandbox::User=root -o Debug::NoLocking=1)
    command -v apt-get >/dev/null || refuse "this is no Debian: the machines are made of Debian's packages"
    # Old lists name packages that the mirror has no more; without root they are all there is.
    [[ $(id -u) != 0 ]] || apt-get update </dev/null >>"$log" 2>&1 || refuse "apt-get update failed: no network?"
    kernel=$(apt-cache depends "$kernel_package" 2>>"$log" | awk '/Depends: linux-image-/ { print $2; exit }')
    [[ -n $kernel ]] || refuse "apt has no $kernel_package: the machines need Debian's own kernel"
    mkdir -p "$work/debs/partial"
    : >"$work/status"
    (cd "$work/debs" && apt-get download "${apt[@]}" "$kernel") </dev/null >>"$log" 2>&1 ||
        refuse "apt-get could not fetch $kernel: no network?"
    apt-get install -y --download-only --no-install-recommends "${apt[@]}" -o "Dir::State::status=$work/status" \
        -o "Dir::Cache::archives=$work/debs" "${guest_packages[@]}" </dev/null >>"$log" 2>&1 ||
        refuse "apt-get could not fetch the machines' packages: no network?"
}

unpack_kernel() {
    local work=$1
    mkdir -p "$work/kernel"
    dpkg-deb --fsys-tarfile "$work"/debs/linux-image-*.deb |
        tar -x -C "$work/kernel" --wildcards --wildcards-match-slash './boot/vmlinuz-*' '*/modules.builtin*' \
            '*/modules.order' "${module_folders[@]/#/*/kernel/}"
    cp "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
}

# Nothing is installed, only unpacked: no script of a package runs, and none needs root.
unpack_guest() {
    local work=$1 root=$1/root deb folder
    mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{etc,opt}
    for folder in bin sbin lib lib64; do
        ln -s "usr/$folder" "$root/$folder"
    done
    for deb in "$work"/debs/*.deb; do
        [[ $(basename "$deb") =~ $not_unpacked || $deb == */linux-image-* ]] && continue
        dpkg-deb --fsys-tarfile "$deb" | tar -x -C "$root" --keep-directory-symlink
    done
    printf 'root:x:0:0:root:/tmp:/bin/bash\n' >"$root/etc/passwd"
    printf 'root:x:0:\n' >"$root/etc/group"
    printf '127.0.0.1 localhost\n' >"$root/etc/hosts"
    (cd "$root" && rm -rf "${not_copied[@]}")
}

# The guest's own Python, run from its folder.
guest_python() {
    local root=$1
    shift
    PYTHONHOME=$root/usr PYTHONPATH=$root/opt/python PYTHONDONTWRITEBYTECODE=1 "$root/lib64/ld-linux-x86-64.so.2" \
        --library-path "$root/usr/lib/x86_64-linux-gnu" "$root"/usr/bin/python3 "$@"
}

# Compiling under emulation would take minutes. Packages carry files for other Pythons, which do not compile here.
compile_folder() {
    guest_python "$1" -m compileall -q -s "$1" --invalidation-mode unchecked-hash "$1/$2" || true
}

build() {
    local work=$1 root=$1/root version
    unpack_kernel "$work" >>"$log" 2>&1 &
    local kernel_pid=$!
    unpack_guest "$work" >>"$log" 2>&1 || fail "the machines' packages could not be unpacked"
    "$python" scripts/rdma_vm_packages.py "$root/opt/python" 2>>"$log" || fail "the services' packages are not installed"
    guest_python "$root" -c 'import grpc, mooncake.engine, numpy, pydantic, uvloop' >>"$log" 2>&1 ||
        fail "the Python of this Debian release cannot use the packages of $python"
    compile_folder "$root" usr/lib >>"$log" 2>&1 &
    compile_folder "$root" opt/python >>"$log" 2>&1
    wait "$kernel_pid" || fail "the kernel could not be unpacked"
    wait
    version=$(basename "$work"/kernel/lib/modules/*)
    mkdir -p "$root/lib/modules"
    mv "$work/kernel/lib/modules/$version" "$root/lib/modules/"
    depmod -b "$root" "$version" >>"$log" 2>&1 || fail "depmod failed"
    "$python" scripts/rdma_vm_archive.py "$root" "$work/root.cpio" || fail "the file system could not be written"
}

mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
: >"$log"
install_tools
wanted=$({ cat scripts/rdma_vm_{image.sh,packages.py,archive.py} requirements/{registry,router,worker}.txt; "$python" -V; } | sha256sum)
if [[ -f $cache/stamp && $(<"$cache/stamp") == "$wanted" && -s $cache/vmlinuz && -s $cache/root.cpio ]]; then
    exit 0
fi
started_s=$SECONDS
say "building the virtual machines' kernel and file system (half a minute)"
work=$(mktemp -d "$cache/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
fetch_packages "$work"
build "$work"
rm -f "$cache/stamp"
mv "$work/vmlinuz" "$work/root.cpio" "$cache/"
printf '%s\n' "$wanted" >"$cache/stamp"
say "built in $((SECONDS - started_s)) s: $(du -h "$cache/root.cpio" | cut -f 1)"
