#!/usr/bin/env bash
# Builds the Java client: build.sh OUT, with PROTOS and GOOGLEAPIS naming the folders of the .proto files.
set -euo pipefail
out=$1
cd "$(dirname "${BASH_SOURCE[0]}")"
rm -rf "$out/generated" "$out/classes"
mkdir -p "$out/generated" "$out/classes"
protoc -I "$PROTOS" -I "$GOOGLEAPIS" --java_out="$out/generated" \
    "$PROTOS"/headrace/inference/v1/{adapter,first_token,inference,latency,sampling,tools}.proto \
    "$GOOGLEAPIS"/google/rpc/{status,error_details}.proto
protoc -I "$PROTOS" --grpc-java_out="$out/generated" \
    --plugin=protoc-gen-grpc-java="$(command -v grpc_java_plugin)" \
    "$PROTOS/headrace/inference/v1/inference.proto"
jars=/usr/share/java
path=$out/classes
for jar in grpc-api grpc-context grpc-core grpc-netty grpc-protobuf grpc-protobuf-lite grpc-stub perfmark-api protobuf \
    guava gson jctools-core netty-{buffer,codec,codec-http,codec-http2,common,handler,resolver,tcnative,transport} \
    geronimo-annotation-1.3-spec; do
    path+=:$jars/$jar.jar
done
find "$out/generated" -name '*.java' >"$out/sources"
javac -nowarn -Xlint:none -encoding UTF-8 -cp "$path" -d "$out/classes" @"$out/sources" ChatClient.java
# Debian's Netty has TLS for HTTP/2 through OpenSSL only. It searches a name with an underscore, and the package has a hyphen.
cp /usr/lib/*/jni/libnetty-tcnative.so "$out/libnetty_tcnative.so"
printf '#!/bin/sh\nexec java -XX:TieredStopAtLevel=1 -Djava.library.path="%s" -cp "%s" ChatClient "$@"\n' "$out" "$path" >"$out/chat"
chmod +x "$out/chat"
