#!/usr/bin/env bash
# Runs compose.yaml with podman and asks the router one question: docker/try.sh
#   HEADRACE_ENGINE=sim HEADRACE_MODEL=sim docker/try.sh     without a real model
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

export HEADRACE_MODELS=${HEADRACE_MODELS:-$PWD/models}
export HEADRACE_MODEL=${HEADRACE_MODEL:-/models/SmolLM2-135M-Instruct}
READY_TIMEOUT_S=300

require_tools
cat >"$CACHE/podman" <<WRAPPER
#!/bin/sh
exec podman ${STORAGE[@]@Q} "\$@"
WRAPPER
chmod +x "$CACHE/podman"
if [ ! -x "$CACHE/venv/bin/podman-compose" ]; then
  python3 -m venv "$CACHE/venv"
  "$CACHE/venv/bin/pip" install --quiet podman-compose==1.6.0
fi
compose() { "$CACHE/venv/bin/podman-compose" --podman-path "$CACHE/podman" -f docker/compose.yaml "$@"; }

finish() {
  status=$?
  [ $status = 0 ] || for name in registry router prefill decode; do say "--- $name"; podman_ logs --tail 15 "headrace_${name}_1" >&2 || true; done
  compose down --timeout 10 >"$CACHE/down.log" 2>&1 || say "compose down failed: see $CACHE/down.log"
  exit $status
}
trap finish EXIT

compose up -d >"$CACHE/up.log" 2>&1 || { tail -n 20 "$CACHE/up.log" >&2; exit 1; }
say "started; waiting for one prefill and one decode worker"
for ((second = 0; second < READY_TIMEOUT_S; second++)); do
  workers=$(.venv/bin/headrace workers --registry 127.0.0.1:7051 2>/dev/null || true)
  [[ $workers == *prefill-0* && $workers == *decode-0* ]] && break
  sleep 1
done
printf '%s\n' "$workers"
.venv/bin/headrace chat --router 127.0.0.1:7050 --temperature 0 --max-tokens 24 "What is the capital of France?"
.venv/bin/headrace trace --internal 127.0.0.1:7054 --no-layers
for name in registry router prefill decode etcd; do
  user=$(podman_ exec "headrace_${name}_1" id -u)
  [ "$user" = 10001 ] || { say "$name runs as user $user, not 10001"; exit 1; }
done
for name in registry router; do
  ! podman_ exec "headrace_${name}_1" /opt/headrace/bin/python -c 'import torch' 2>/dev/null \
    && ! podman_ exec "headrace_${name}_1" /opt/headrace/bin/python -c 'import mooncake' 2>/dev/null \
    || { say "the image of the $name holds torch or mooncake"; exit 1; }
done
say "all services answer, none runs as root"
