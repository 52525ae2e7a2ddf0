#!/usr/bin/env bash
# Everything there is to know about llamaspec on one CUDA card, in under 12 minutes, without a network.
#
#   bench/gpu/run.sh pack WHEELS     on a machine with a network and the same Python: fetch what the other one needs
#   bench/gpu/run.sh WHEELS OUT      on the machine with the card (nvcc, cmake, a C++ compiler, Python 3.11 or newer)
#
# It builds llama-cpp-python for the card that is there, writes models of 7B and 27B shapes with random weights (see models.py)
# and measures them. OUT/results.jsonl grows row by row: what is there when time runs out stays, and OUT/table.md is made from it.
# The steps are in order of worth; one that fails is noted in OUT/log and the next one begins. WORK (default: OUT/work) takes
# 20 GB of models, and keeps what was built and written for the next run. MINUTES (default: 12) is the time for all, SIZES
# (default: 7b 27b) what is measured, MEASURE more options for it, as "-n 256".
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}

if [ "${1:-}" = pack ]; then
    wheels=${2:?usage: run.sh pack WHEELS}
    mkdir -p "$wheels"
    # what the project needs, its own pyproject.toml says; llama-cpp-python as source, to be built for the card
    "$python" -m pip download -q -d "$wheels" --no-binary llama-cpp-python "$root" 'setuptools>=77' wheel scikit-build-core ninja
    exit
fi

wheels=$(cd "${1:?usage: run.sh WHEELS OUT}" && pwd)
out=${2:?usage: run.sh WHEELS OUT}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=${WORK:-$out/work}
mkdir -p "$work"
deadline=$(($(date +%s) + ${MINUTES:-12} * 60))
left() { echo $((deadline - $(date +%s))); }

step() { # name, seconds at most, command...
    local name=$1 limit=$2
    shift 2
    local rest
    rest=$(left)
    if [ "$rest" -lt 20 ]; then
        echo "skipped $name: no time left" | tee -a "$out/log"
        return 1
    fi
    [ "$limit" -lt "$rest" ] || limit=$rest
    local began
    began=$(date +%s)
    echo "== $name" >>"$out/log"
    timeout "$limit" "$@" >>"$out/log" 2>&1
    local status=$?
    echo "$name: status $status, $(($(date +%s) - began)) s" | tee -a "$out/log"
    return $status
}

install() {
    local card
    card=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d '. ')
    "$python" -m venv "$work/venv" &&
        "$work/venv/bin/pip" install --no-index --find-links "$wheels" setuptools wheel scikit-build-core ninja &&
        CMAKE_ARGS="-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES=${card:-native}" CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
            "$work/venv/bin/pip" install --no-index --find-links "$wheels" --no-build-isolation llama-cpp-python &&
        "$work/venv/bin/pip" install --no-index --find-links "$wheels" --no-build-isolation -e "$root"
}

bench() { "$work/venv/bin/python" -m "llamaspec.bench.gpu.$1" "${@:2}"; }
export -f install bench
export python wheels work root

finish() { bench table "$out/results.jsonl" >"$out/table.md" 2>>"$out/log"; }
trap finish EXIT

measure() { # label, seconds, more... of the pair written last
    local label=$1 seconds=$2 target draft
    shift 2
    read -r target draft <"$work/pair" || return 1
    # shellcheck disable=SC2086 -- MEASURE holds several words
    step "measure $(basename "$target")${label:+ $label}" $((seconds + 60)) \
        bash -c 'bench measure "$@"' _ "$target" "$draft" --out "$out/results.jsonl" --label "$label" --seconds "$seconds" "$@" ${MEASURE:-}
}

write() { # size, the draft's share of layers, more...
    local size=$1 part=$2
    shift 2
    step "write $size${*:+ $*}" 240 bash -c 'bench models "$1" "$2" --part "$3" "${@:4}" >"$1/pair"' _ "$work" "$size" "$part" "$@"
}

if [ ! -x "$work/venv/bin/llamaspec" ]; then
    step install 420 bash -c install || exit 1
fi
step doctor 30 bash -c "'$work/venv/bin/llamaspec' doctor --json >'$out/doctor.json'"
read -r first others <<<"${SIZES:-7b 27b}"
write "$first" 0.1 && measure '' 60
GGML_CUDA_DISABLE_GRAPHS=1 measure graphs-off 30 --lengths 1,3,7
for size in $others; do
    write "$size" 0.05 && measure '' 90
done
write "$first" 0.1 --noise 0.03 && measure noisy 60
