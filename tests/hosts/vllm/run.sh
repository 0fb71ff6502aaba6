#!/usr/bin/env bash
# Run all that is run inside vLLM: tests/hosts/vllm/run.sh [FOLDER of vLLM's venv, made if missing]
# $POLYLENS_PYTHON: polylens' own environment, where checkpoints and references are made.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../../.."
POLYLENS_VLLM_PYTHON=$("$here/venv.sh" "$@")
export POLYLENS_VLLM_PYTHON
exec "${POLYLENS_PYTHON:-python}" -m pytest -q -m "full or not full" tests/hosts/vllm
