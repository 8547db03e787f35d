#!/usr/bin/env bash
# Runs compose.yaml with docker or podman, asks the router one question, and checks that every container is confined: docker/try.sh
#   HEADRACE_MODEL=sim docker/try.sh     without a real model
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

export HEADRACE_MODELS=${HEADRACE_MODELS:-$PWD/models}
export HEADRACE_MODEL=${HEADRACE_MODEL:-/models/SmolLM2-135M-Instruct}
# Limits in seconds, which the environment may change.
UP_TIMEOUT_S=${UP_TIMEOUT_S:-180}
READY_TIMEOUT_S=${READY_TIMEOUT_S:-300}
DOWN_TIMEOUT_S=${DOWN_TIMEOUT_S:-90}
# A service that cannot start ends and is restarted, again and again.
RESTARTS_MAX=5
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
  timeout "$INSTALL_TIMEOUT_S" "${PYTHON:-.venv/bin/python}" -m venv "$CACHE/venv" >"$CACHE/venv.log" 2>&1 \
    || fail "no environment for podman-compose" "$CACHE/venv.log"
  timeout "$INSTALL_TIMEOUT_S" "$CACHE/venv/bin/pip" install --quiet --no-deps --require-hashes \
    -r requirements/compose.txt </dev/null >"$CACHE/venv.log" 2>&1 \
    || fail "pip could not install podman-compose within $INSTALL_TIMEOUT_S s" "$CACHE/venv.log"
  touch "$stamp"
fi
# The first argument is the limit in seconds.
compose() {
  timeout --kill-after=10 "$1" "${composer[@]}" -f docker/compose.yaml "${@:2}" </dev/null
}
# The `headrace` command inside the deployment, with the operator's token.
operator() { compose "$CALL_TIMEOUT_S" --profile operator run --rm -T operator "$@"; }
container_of() { echo "headrace${separator}${1}${separator}1"; }
inside() { engine "$CALL_TIMEOUT_S" exec "$(container_of "$1")" "${@:2}"; }

# Exits when a service was restarted too often.
check_restarts() {
  local name count
  for name in "${SERVICES[@]}"; do
    count=$(engine "$CALL_TIMEOUT_S" inspect --format '{{.RestartCount}}' "$(container_of "$name")" 2>"$CACHE/inspect.log") \
      || fail "there is no container of $name" "$CACHE/inspect.log"
    ((count <= RESTARTS_MAX)) || { say "$name ended $count times, see its log"; exit 1; }
  done
}

finish() {
  status=$?
  [ $status = 0 ] || for name in credentials "${SERVICES[@]}"; do
    say "--- $name"
    # Not --tail: with it podman 4.3 leaves out a line that was written in parts.
    engine "$CALL_TIMEOUT_S" logs "$(container_of "$name")" 2>&1 | tail -n 15 >&2 || true
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
  check_restarts
  sleep 1
done
printf '%s\n' "$workers"
timeout "$CALL_TIMEOUT_S" .venv/bin/headrace chat --router 127.0.0.1:7050 --temperature 0 --max-tokens 24 \
  "What is the capital of France?" || { say "no answer within $CALL_TIMEOUT_S s"; exit 1; }
operator trace --registry registry:7051 --no-layers || { say "no trace of the answer"; exit 1; }

# Without a token of this deployment, a caller reaches nothing of its own but InferenceService.
! timeout "$CALL_TIMEOUT_S" .venv/bin/headrace workers --registry 127.0.0.1:7051 >"$CACHE/stranger.log" 2>&1 \
  && grep -q "credential\|token" "$CACHE/stranger.log" || fail "the registry answers a caller without a token" "$CACHE/stranger.log"
for name in "${SERVICES[@]}"; do
  # Of all processes. Some may end meanwhile.
  status=$(inside "$name" sh -c 'cat /proc/[0-9]*/status 2>/dev/null | sort -u')
  for line in Uid:$'\t'10001$'\t'10001$'\t'10001$'\t'10001 {CapPrm,CapBnd}:$'\t'0000000000000000 NoNewPrivs:$'\t'1; do
    found=$(grep "^${line%%:*}:" <<<"$status" || true)
    [ "$found" = "$line" ] || { say "$name is not confined: /proc/PID/status has $found, not $line"; exit 1; }
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
