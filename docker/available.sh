#!/usr/bin/env bash
# Exits with 0 when images can be built and started here: docker/available.sh
# It installs podman where it may, and gets the base image. Else it says what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
. docker/tools.sh

choose_engine
ensure_base_image
