#!/usr/bin/env bash
# What does headrace do on this accelerator? Every first measurement, as steps that resume where the last call stopped.
#
#   benchmarks/gpu/first_contact.sh [DIRECTORY]
#
# DIRECTORY (build/first_contact) gets a log of each step, steps.jsonl, rows.jsonl, table.txt and page.html. A call takes
# SECONDS_LEFT (540) at most: it begins no step that has not enough of them, and exits with 75 if steps are left. A step
# that ends, well or not, is not repeated; remove its line from DIRECTORY/steps.jsonl to repeat it. Needs what headrace
# needs and transformers, and no network; pytest and peft for one step each. `make first-contact-emulated` tries it all
# without an accelerator, by DEVICE=emu SIZE=tiny; PATIENCE=N gives each step N times as long.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
directory=${1:-build/first_contact}
mkdir -p "$directory"
export PYTHONPATH=. PYTHONUNBUFFERED=1 HEADRACE_TEST_ACCELERATOR=${DEVICE:-}
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-540}))
rows=(--output "$directory/rows.jsonl")
[ -n "${DEVICE:-}" ] && rows+=(--device "$DEVICE")
left=0

step() { # NAME SECONDS COMMAND...: `SECONDS`: the most that it may take, times PATIENCE (1)
    local name=$1 most=$(($2 * ${PATIENCE:-1})) begun=$SECONDS code
    shift 2
    grep -qs "\"step\": \"$name\"" "$directory/steps.jsonl" && return
    if ((end - SECONDS < most)); then
        left=$((left + 1))
        return
    fi
    echo "== $name: $*"
    timeout --kill-after=5 "$most" "$@" 2>&1 | tee "$directory/$name.partial"
    code=${PIPESTATUS[0]}
    mv "$directory/$name.partial" "$directory/$name.log"
    echo "{\"step\": \"$name\", \"code\": $code, \"seconds\": $((SECONDS - begun)), \"command\": \"$*\"}" \
        >>"$directory/steps.jsonl"
}

measure() { # NAME SECONDS CASE FLAGS...: one case of `python -m benchmarks.gpu`; of a tiny model with SIZE=tiny
    local name=$1 most=$2 case=$3
    shift 3
    [ -n "${SIZE:-}" ] && set -- --size "$SIZE" --ways plain,headrace --steps 2
    [ -n "${SIZE:-}" ] && [[ $case =~ updates|micro_batches ]] && set -- --size "$SIZE" --steps 2
    step "$name" "$most" "$python" -m benchmarks.gpu "$case" "$@" "${rows[@]}"
}

# Does it run, and is it exact?
step machine 60 "$python" -m torch.utils.collect_env
[ -e headrace/optim/_kernel.abi3.so ] || step kernel 180 "$python" setup.py build_ext --inplace
# Without plugins of pytest's, with any release of it and of all others: no warning is an error.
step tests 240 "$python" -m pytest -q --maxfail=20 -W default -o minversion=0 -o addopts=--import-mode=importlib \
    -p no:cacheprovider tests/gpu
step host 60 "$python" benchmarks/overhead.py --device "${DEVICE:-cuda}" ${SIZE:+--rounds 3}
step fork 120 "$python" -m benchmarks.gpu.fork "${DEVICE:-}" ${SIZE:+0.1}
# Is it fast? First beside everything on the device, then beside others. `decode_again`: does plain repeat its tokens?
measure train 300 train --size 8b --device-memory 8GiB --tokens 2048,8192,32768 --ways plain,headrace
measure decode 200 decode --ways plain,headrace
measure moe 200 moe
measure updates 240 updates
measure activations 120 activations
measure micro_batches 200 micro_batches
measure decode_again 120 decode --tokens 8 --ways plain,headrace
measure dit 120 dit --ways plain,headrace
measure lora 240 lora --ways plain,headrace
measure disk 240 disk --ways plain,headrace
measure train_room 300 train --size 8b --device-memory 16GiB,24GiB --tokens 8192,16384 --ways plain,headrace
measure train_3b 240 train --size 3b --device-memory 2GiB
measure decode_beside 240 decode --tokens 1
measure dit_beside 120 dit --ways plain,headrace,diffusers
measure lora_beside 300 lora

"$python" -m benchmarks.gpu.page "$directory"
if ((left > 0)); then
    echo "$left steps are left: call it again"
    exit 75
fi
