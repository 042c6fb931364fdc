#!/bin/sh
# What only a GPU can say, in under 6 minutes on one Hopper GPU with torch 2.11 and triton 3.6:
# every Triton kernel against float64, medians and roofline fractions; then a trainer step.
#   bench/gpu.sh [FOLDER]      results as JSON in FOLDER (default: the current one)
set -eu
cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-.}" && cd "${1:-.}" && pwd)
python=${PYTHON:-python}
timeout 200 "$python" bench/gpu_kernels.py --json "$out/gpu_kernels.json"
timeout 150 "$python" bench/gpu_train_step.py --json "$out/gpu_train_step.json"
