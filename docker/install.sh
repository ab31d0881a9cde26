#!/usr/bin/env bash
# Install the requirements as pinned; torch and torchvision first, from TORCH_INDEX, if that is given. For docker/Dockerfile.
set -euo pipefail
if [ -e /run/secrets/pip.conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip.conf; fi
if [ -e /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi
export PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1
pins="${KIT:-/opt/muster}/constraints.txt"
if [ -n "${TORCH_INDEX:-}" ]; then pip install -c "$pins" --no-deps --index-url "$TORCH_INDEX" torch torchvision; fi
pip install -c "$pins" -r "${pins%/*}/requirements.txt"
