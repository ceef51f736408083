#!/usr/bin/env bash
# What does headrace do on this accelerator? Every first measurement, as steps that resume where the last call stopped.
#
#   benchmarks/gpu/first_contact.sh [DIRECTORY]
#
# DIRECTORY (first_contact) gets a log of each step, steps.jsonl, rows.jsonl, table.txt and page.html. A call takes
# SECONDS_LEFT (540) at most: it begins no step that has not enough of them, and exits with 75 if steps are left. A step
# that ends, well or not, is not repeated; remove DIRECTORY/NAME.log to repeat it. Needs torch, transformers, peft,
# psutil and pytest, and no network. DEVICE=emu SIZE=tiny tries the script without an accelerator.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
directory=${1:-first_contact}
mkdir -p "$directory"
export PYTHONPATH=. PYTHONUNBUFFERED=1 HEADRACE_TEST_ACCELERATOR=${DEVICE:-}
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-540}))
rows=(--output "$directory/rows.jsonl")
[ -n "${DEVICE:-}" ] && rows+=(--device "$DEVICE")
left=0

step() { # NAME SECONDS COMMAND...: `SECONDS`: the most that it may take
    local name=$1 most=$2 begun=$SECONDS code
    shift 2
    [ -e "$directory/$name.log" ] && return
    if ((end - SECONDS < most)); then
        left=$((left + 1))
        return
    fi
    echo "== $name: $*"
    timeout "$most" "$@" 2>&1 | tee "$directory/$name.partial"
    code=${PIPESTATUS[0]}
    mv "$directory/$name.partial" "$directory/$name.log"
    echo "{\"step\": \"$name\", \"code\": $code, \"seconds\": $((SECONDS - begun)), \"command\": \"$*\"}" \
        >>"$directory/steps.jsonl"
}

measure() { # NAME SECONDS CASE FLAGS...: one case of `python -m benchmarks.gpu`; of a tiny model with SIZE=tiny
    local name=$1 most=$2 case=$3
    shift 3
    [ -n "${SIZE:-}" ] && set -- --size "$SIZE" --ways plain,headrace --steps 2
    step "$name" "$most" "$python" -m benchmarks.gpu "$case" "$@" "${rows[@]}"
}

# Does it run, and is it exact?
step machine 60 "$python" -m torch.utils.collect_env
step kernel 120 "$python" setup.py build_ext --inplace
step tests 240 "$python" -m pytest -q -x -o minversion=0 -p no:cacheprovider tests/gpu
step fork 120 "$python" -m benchmarks.gpu.fork "${DEVICE:-}" ${SIZE:+0.1}
# Is it fast?
measure train 300 train --size 8b --device-memory 8GiB --tokens 2048,8192,32768 --ways plain,headrace
measure decode 200 decode --ways plain,headrace,accelerate
measure dit 120 dit
measure activations 120 activations
measure lora 240 lora
measure train_3b 240 train --size 3b --device-memory 2GiB
measure disk 240 disk
measure train_room 300 train --size 8b --device-memory 16GiB,24GiB --tokens 8192,16384 --ways plain,headrace

"$python" -m benchmarks.gpu.page "$directory"
if ((left > 0)); then
    echo "$left steps are left: call it again"
    exit 75
fi
