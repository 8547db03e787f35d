#!/usr/bin/env bash
# Builds the Go client: build.sh OUT, with PROTOS naming the folder of the .proto files.
# Debian's packages of Go libraries are for GOPATH. With modules, go.mod names the same libraries.
set -euo pipefail
out=$1
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$out/src"
# The option go_package of the protos puts the code into $out/src/headrace/inference/v1.
protoc -I "$PROTOS" --go_out="$out/src" --go-grpc_out="$out/src" \
    "$PROTOS"/headrace/inference/v1/{adapter,first_token,inference,latency,sampling,tools}.proto
export GO111MODULE=off GOPATH=$out:/usr/share/gocode GOCACHE=$out/cache
go build -o "$out/chat" chat.go
