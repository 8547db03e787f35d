#!/usr/bin/env bash
# Builds kube-apiserver and kube-controller-manager for `make test-kube` from Debian's source package, into
# .cache/kube-apiserver. Takes some five minutes on two cores and 2 GB of disk, once.
#   scripts/build_kube_apiserver.sh
# Exit 0: both programs are there. Exit 3: Debian's packages cannot be had here, and the last line says why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cache=$PWD/.cache/kube-apiserver
log=$cache/build.log
programs=(kube-apiserver kube-controller-manager)
go=/usr/lib/go-1.19
# The source has a release of reflect2 that does not work with maps of this Go: the server crashes when it reads a
# custom resource. Debian's own package of reflect2 is a later release.
reflect2=/usr/share/gocode/src/github.com/modern-go/reflect2
packages=(golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev rsync make gcc libc6-dev dpkg-dev)
suite=bookworm
cannot_have=3
wanted=$(sha256sum <scripts/build_kube_apiserver.sh)

say() { printf '[kube] %s\n' "$*"; }
refuse() { [[ ! -s $log ]] || tail -n 5 "$log" >&2; say "$*"; exit "$cannot_have"; }
fail() { tail -n 15 "$log" >&2; printf 'kube: %s\n' "$*" >&2; exit 1; }

built() {
    local program
    [[ -f $cache/stamp && $(<"$cache/stamp") == "$wanted" ]] || return 1
    for program in "${programs[@]}"; do [[ -x $cache/$program ]] || return 1; done
}

install_go() {
    [[ -x $go/bin/go && -d $reflect2 ]] && command -v rsync >/dev/null && return
    [[ $(id -u) == 0 ]] || refuse "Go is missing; as root: apt-get install ${packages[*]}"
    say "installing Debian packages: ${packages[*]}"
    { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${packages[@]}"; } \
        </dev/null >"$log" 2>&1 || refuse "apt-get cannot install Go"
}

# The machine's own sources of packages stay as they are.
fetch_source() {
    local apt=$cache/apt mirror
    mirror=$(apt-get indextargets --format '$(SITE)' 2>/dev/null | grep -m 1 -v -e security -e cloud || true)
    mkdir -p "$apt/parts" "$apt/lists/partial" "$cache/source"
    printf 'deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' \
        "${mirror:-http://deb.debian.org/debian}" "$suite" >"$apt/parts/source.list"
    printf 'Dir::Etc::sourcelist "/dev/null"; Dir::Etc::sourceparts "%s"; Dir::State::lists "%s";\n' \
        "$apt/parts" "$apt/lists" >"$apt/apt.conf"
    say "fetching Debian's source of Kubernetes"
    { APT_CONFIG=$apt/apt.conf apt-get update && cd "$cache/source" &&
        APT_CONFIG=$apt/apt.conf apt-get source --download-only kubernetes; } </dev/null >"$log" 2>&1 ||
        refuse "apt-get cannot fetch the source of Kubernetes"
}

build() {
    local tree=$cache/go/src/k8s.io/kubernetes version
    mkdir -p "$tree" "$cache/home"
    tar --extract --strip-components=1 --directory "$tree" --file "$cache"/source/kubernetes_*.orig.tar.gz
    rm -rf "$tree/vendor/github.com/modern-go/reflect2"
    cp -rL "$reflect2" "$tree/vendor/github.com/modern-go/"
    version=$(sed -nE 's/.*really([0-9.]+)-.*/\1/p' <<<"$(ls "$cache"/source/*.dsc)")
    say "building Kubernetes $version (some five minutes)"
    (
        cd "$tree"
        export HOME=$cache/home GOPATH=$cache/go GOPROXY=off CGO_ENABLED=0 PATH="$go/bin:$PATH"
        export KUBE_GIT_VERSION="v$version" KUBE_GIT_MAJOR=${version%%.*} KUBE_GIT_COMMIT=none KUBE_GIT_TREE_STATE=clean
        KUBE_GIT_MINOR=$(cut -d . -f 2 <<<"$version")
        export KUBE_GIT_MINOR
        timeout 3000 nice make WHAT="${programs[*]/#/cmd/}"
    ) </dev/null >"$log" 2>&1 || fail "the build failed; see $log"
    for program in "${programs[@]}"; do
        cp "$tree/_output/local/go/bin/$program" "$cache/$program.new"
        mv "$cache/$program.new" "$cache/$program"
    done
    chmod -R u+w "$cache/go" "$cache/home"
    rm -rf "$cache/go" "$cache/home" "$cache/source" "$cache/apt"
    printf '%s\n' "$wanted" >"$cache/stamp"
}

if built; then exit 0; fi
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9
if built; then exit 0; fi
install_go
fetch_source
build
say "ready: $cache"
