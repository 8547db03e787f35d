#!/usr/bin/env bash
# Runs compose.yaml with docker or podman, asks the router one question, and checks that every container is confined: docker/try.sh
#   HEADRACE_ENGINE=sim HEADRACE_MODEL=sim docker/try.sh     without a real model
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

export HEADRACE_MODELS=${HEADRACE_MODELS:-$PWD/models}
export HEADRACE_MODEL=${HEADRACE_MODEL:-/models/SmolLM2-135M-Instruct}
UP_TIMEOUT_S=180
READY_TIMEOUT_S=300
DOWN_TIMEOUT_S=90
SERVICES=(registry router prefill decode etcd)

choose_engine
if [ "$ENGINE" = docker ]; then
  composer=(docker compose) separator=-
else
  composer=("$CACHE/venv/bin/podman-compose" --podman-path "$CACHE/engine") separator=_
fi
stamp=$CACHE/venv/.$(sha256sum requirements/compose.txt | cut -c1-16)
if [ "$ENGINE" = podman ] && [ ! -e "$stamp" ]; then
  mkdir -p "$CACHE/venv"
  timeout "$INSTALL_TIMEOUT_S" python3 -m venv "$CACHE/venv"
  timeout "$INSTALL_TIMEOUT_S" "$CACHE/venv/bin/pip" install --quiet --no-deps --require-hashes \
    -r requirements/compose.txt >"$CACHE/venv.log" 2>&1 || fail "pip could not install podman-compose" "$CACHE/venv.log"
  touch "$stamp"
fi
# The first argument is the limit in seconds.
compose() {
  timeout --kill-after=10 "$1" "${composer[@]}" -f docker/compose.yaml "${@:2}" </dev/null
}
# The `headrace` command inside the deployment, with the operator's token.
operator() { compose "$CALL_TIMEOUT_S" --profile operator run --rm -T operator "$@"; }
inside() { engine "$CALL_TIMEOUT_S" exec "headrace${separator}${1}${separator}1" "${@:2}"; }

finish() {
  status=$?
  [ $status = 0 ] || for name in credentials "${SERVICES[@]}"; do
    say "--- $name"
    engine "$CALL_TIMEOUT_S" logs --tail 15 "headrace${separator}${name}${separator}1" >&2 || true
  done
  compose "$DOWN_TIMEOUT_S" down --volumes --timeout 30 >"$CACHE/down.log" 2>&1 || say "compose down failed: see $CACHE/down.log"
  exit $status
}
trap finish EXIT

compose "$UP_TIMEOUT_S" up -d >"$CACHE/up.log" 2>&1 || fail "the containers did not start within $UP_TIMEOUT_S s" "$CACHE/up.log"
say "started; waiting for one prefill and one decode worker"
give_up_s=$((SECONDS + READY_TIMEOUT_S))
until workers=$(operator workers --registry registry:7051 2>"$CACHE/operator.log") \
  && [[ $workers == *prefill-0* && $workers == *decode-0* ]]; do
  ((SECONDS < give_up_s)) || fail "the workers did not register within $READY_TIMEOUT_S s" "$CACHE/operator.log"
  sleep 1
done
printf '%s\n' "$workers"
timeout "$CALL_TIMEOUT_S" .venv/bin/headrace chat --router 127.0.0.1:7050 --temperature 0 --max-tokens 24 \
  "What is the capital of France?"
operator trace --registry registry:7051 --no-layers

# Without a token of this deployment, a caller reaches nothing of its own but InferenceService.
! timeout "$CALL_TIMEOUT_S" .venv/bin/headrace workers --registry 127.0.0.1:7051 >"$CACHE/stranger.log" 2>&1 \
  && grep -q "credential\|token" "$CACHE/stranger.log" || fail "the registry answers a caller without a token" "$CACHE/stranger.log"
for name in "${SERVICES[@]}"; do
  user=$(inside "$name" id -u)
  [ "$user" = 10001 ] || { say "$name runs as user $user, not 10001"; exit 1; }
  status=$(inside "$name" cat /proc/1/status)
  for line in CapPrm:$'\t'0000000000000000 CapBnd:$'\t'0000000000000000 NoNewPrivs:$'\t'1; do
    [[ $status == *"$line"* ]] || { say "$name is not confined: no $line in /proc/1/status"; exit 1; }
  done
  written=$(inside "$name" sh -c 'echo x >/opt/x' 2>&1) || true
  [[ $written == *Read-only* ]] || { say "the root file system of $name can be written: $written"; exit 1; }
  ! inside "$name" ls /credentials/key 2>/dev/null || { say "$name has the private key"; exit 1; }
done
for name in registry router; do
  ! inside "$name" /opt/headrace/bin/python -c 'import torch' 2>/dev/null \
    && ! inside "$name" /opt/headrace/bin/python -c 'import mooncake' 2>/dev/null \
    || { say "the image of the $name holds torch or mooncake"; exit 1; }
done
say "all services answer with tokens; no process is root, has a capability or can write to its root file system"
