#!/usr/bin/env bash
# The first runs on a GPU, in stages of at most 9 minutes. A stage that is cut off leaves what it measured, and goes on
# there when it is run again.
#
#   benchmarks/gpu.sh STAGE [--only PATTERN] [--seconds N]
#
#   1  numeric tests, natively; then compute-sanitizer over one decode and one 4-bit product
#   2  attention beside its peers      3  linear layers beside theirs
#   4  generate() of an 8B shape: transformers' loop and ours      5  warp-specialised attention alone: it may hang
#
# Everything is written under $OUT (default: output/gpu). Nothing is installed: $PYTHON (default: python3) needs torch
# and triton, for stage 4 transformers as well. DRY=1 runs small sizes on a CPU, which tests this script.
set -uo pipefail

usage() { sed -n '5,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

stage=${1:-}; [[ $# -gt 0 ]] && shift
only=() seconds=500
while [[ $# -gt 0 ]]; do
    case $1 in
        --only) [[ $# -gt 1 ]] || usage; only=(--only "$2"); shift 2 ;;
        --seconds) [[ ${2:-} =~ ^[0-9]+$ ]] || usage; seconds=$2; shift 2 ;;
        *) usage ;;
    esac
done
[[ $stage =~ ^[1-5]$ ]] || usage

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$root/output/gpu} python=${PYTHON:-python3} end=$((SECONDS + seconds))
mkdir -p "$out"
# the package as setup.cfg would install it: the adapters stand beside it in the repository
package=$(mktemp -d) && trap 'rm -rf "$package"' EXIT
mkdir "$package/hf_efficient"
ln -s "$root"/hf_efficient/* "$package/hf_efficient/"
ln -s "$root/integrations" "$package/hf_efficient/integrations"
export PYTHONPATH=$package:$root/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$out/triton_cache TORCHINDUCTOR_CACHE_DIR=$out/inductor_cache

dry=()
if [[ -n ${DRY:-} ]]; then
    dry=(--tiny); export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
fi

# limited NAME COMMAND...: for the time that is left, with its output in $OUT/NAME.log, too
limited() {
    local name=$1 left=$((end - SECONDS)); shift
    if ((left < 5)); then echo "$name: no time left"; return 124; fi
    timeout --kill-after=10 "$left" "$@" 2>&1 | tee -a "$out/$name.log"
}

# a benchmark begins no case in the last 30 seconds, to write its record
bench() {
    local script=$1 name=$2 left=$((end - SECONDS - 30)); shift 2
    limited "$name" "$python" "$root/benchmarks/$script.py" --output "$out/$name.json" --seconds $((left > 1 ? left : 1)) \
        ${dry[@]+"${dry[@]}"} "$@" ${only[@]+"${only[@]}"}
}

tests=(-m pytest -q -p no:cacheprovider -c "$root/setup.cfg" --rootdir "$root")
case $stage in
    1)
        select="not hopper and not variant${only[1]:+ and (${only[1]})}"
        files=("$root"/tests/kernels/test_*_numeric.py)
        [[ -n ${DRY:-} ]] && files=("$root/tests/kernels/test_efficient_linear_gate_up_numeric.py")
        limited numeric "$python" "${tests[@]}" -k "$select" --junitxml "$out/numeric.xml" "${files[@]}"
        status=$?
        if command -v compute-sanitizer > /dev/null; then
            for tool in memcheck initcheck; do
                for case in test_flash_paged_decode_numeric.py:counters test_efficient_linear_numeric.py:counters; do
                    PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited "$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
                        "$python" "${tests[@]}" -k "${case#*:}" "$root/tests/kernels/${case%:*}" || status=1
                done
            done
        else
            echo "compute-sanitizer: not found" | tee -a "$out/memcheck.log"
        fi
        exit $status ;;
    2) [[ ${#only[@]} -eq 0 ]] && only=(--only '^(?!flash_paged prefill, )'); bench attention attention --quick ;;
    3) bench linear linear --quick ;;
    4) bench gpu_generate generate ;;
    5) [[ ${#only[@]} -eq 0 ]] && only=(--only '^flash_paged prefill, '); bench attention warp_specialised --quick ;;
esac
