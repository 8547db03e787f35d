#!/usr/bin/env bash
# Builds the C++ client: build.sh OUT, with PROTOS and GOOGLEAPIS naming the folders of the .proto files.
set -euo pipefail
out=$1
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$out/generated"
# The protos that inference.proto imports, and those of errors.
protos=("$PROTOS"/headrace/inference/v1/{adapter,first_token,inference,latency,sampling,tools}.proto
    "$GOOGLEAPIS"/google/rpc/{status,error_details}.proto)
protoc -I "$PROTOS" -I "$GOOGLEAPIS" --cpp_out="$out/generated" "${protos[@]}"
protoc -I "$PROTOS" --grpc_out="$out/generated" --plugin=protoc-gen-grpc="$(command -v grpc_cpp_plugin)" \
    "$PROTOS/headrace/inference/v1/inference.proto"
# One compiler for each processor.
find "$out/generated" "$PWD/chat.cpp" -name '*.c*' -print0 |
    xargs -0 -P "$(nproc)" -I {} sh -c 'g++ -std=c++17 -I "$1/generated" $(pkg-config --cflags grpc++ protobuf) \
        -c "$2" -o "$1/$(basename "$2").o"' sh "$out" {}
g++ "$out"/*.o $(pkg-config --libs grpc++ protobuf) -o "$out/chat"
