#!/usr/bin/env bash
# Builds the Rust client: build.sh OUT, with PROTOS and GOOGLEAPIS naming the folders of the .proto files.
# Crates come from Debian's packages, without a network.
set -euo pipefail
out=$1
cd "$(dirname "${BASH_SOURCE[0]}")"
# cargo writes Cargo.lock beside Cargo.toml.
rm -rf "$out/crate"
mkdir -p "$out/crate/.cargo"
cp -r Cargo.toml build.rs src "$out/crate"
cat >"$out/crate/.cargo/config.toml" <<'CONFIG'
[source.crates-io]
replace-with = "debian"
[source.debian]
directory = "/usr/share/cargo/registry"
CONFIG
cd "$out/crate"
cargo build --offline --quiet --target-dir "$out/target"
cp "$out/target/debug/chat" "$out/chat"
