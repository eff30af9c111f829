#!/usr/bin/env bash
# The first runs on a GPU, in stages of at most 9 minutes. A stage that is cut off leaves what it measured, and goes on
# there when it is run again.
#
#   benchmarks/gpu.sh STAGE [--only PATTERN] [--seconds N]
#
#   1  tests of models that need a GPU, and the kernels' numeric tests natively; then compute-sanitizer over one decode
#      and one 4-bit product
#   2  attention beside its peers      3  linear layers beside theirs
#   4  generate() of an 8B shape: transformers' loop and ours
#   all  one after the other in N seconds together; what a stage leaves, the next ones have
#
# Results are written under $OUT (default: output/gpu), at most 8 files, and everything printed to $OUT/gpu.log.
# Compiled kernels are kept under $CACHE (default: output/gpu_cache). Nothing is installed: $PYTHON (default: python3)
# needs torch, triton and transformers, and pytest for stages 1 and 4. DRY=1 runs small sizes on a CPU, which tests this
# script.
set -uo pipefail

usage() { sed -n '5,17s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }

stage=${1:-}; [[ $# -gt 0 ]] && shift
only=() seconds=500
while [[ $# -gt 0 ]]; do
    case $1 in
        --only) [[ $# -gt 1 ]] || usage; only=(--only "$2"); shift 2 ;;
        --seconds) [[ ${2:-} =~ ^[0-9]+$ ]] || usage; seconds=$2; shift 2 ;;
        *) usage ;;
    esac
done
[[ $stage =~ ^([1-4]|all)$ ]] || usage

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$root/output/gpu} cache=${CACHE:-$root/output/gpu_cache} python=${PYTHON:-python3} end=$((SECONDS + seconds))
mkdir -p "$out" "$cache" && out=$(cd "$out" && pwd) && cache=$(cd "$cache" && pwd) || exit
# the package as setup.cfg would install it: the adapters stand beside it in the repository, where Python must not start
package=$(mktemp -d) && trap 'rm -rf "$package"' EXIT
mkdir "$package/hf_efficient"
ln -s "$root"/hf_efficient/* "$package/hf_efficient/"
ln -s "$root/integrations" "$package/hf_efficient/integrations"
export PYTHONPATH=$package:$root/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor

dry=() jobs=$(nproc) && jobs=$((jobs > 15 ? 15 : jobs)) parts=$jobs
if [[ -n ${DRY:-} ]]; then
    dry=(--tiny) jobs=1 parts=20; export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=
fi

# limited COMMAND...: for the time that is left, with its output in the log, too. Interrupted, pytest tells what failed.
limited() {
    local left=$((end - SECONDS))
    if ((left < 5)); then echo "no time left for: $*" | tee -a "$out/gpu.log"; return 124; fi
    (cd "$package" && timeout --signal=INT --kill-after=10 "$left" "$@" 2>&1) | tee -a "$out/gpu.log"
}

# compiled SCRIPT ARGUMENTS...: every kernel of a benchmark compiled before it, by a process on every core
compiled() {
    local script=$root/benchmarks/$1.py part left=$(((end - SECONDS) / 3)) first=$SECONDS; shift
    for ((part = 0; part < jobs; part++)); do
        (cd "$package" && timeout --kill-after=5 $((left > 1 ? left : 1)) "$python" "$script" --compile "$part/$parts" \
            --output "$package/$part.json" ${dry[@]+"${dry[@]}"} "$@" ${only[@]+"${only[@]}"} > "$part.log" 2>&1) &
    done
    wait
    echo "compiled in $((SECONDS - first)) s" | tee -a "$out/gpu.log"
}

# a benchmark begins no case in the last 10 seconds, to write its record
bench() {
    local script=$root/benchmarks/$1.py name=$2 left=$((end - SECONDS - 10)); shift 2
    limited "$python" "$script" --output "$out/$name.json" --seconds $((left > 1 ? left : 1)) \
        ${dry[@]+"${dry[@]}"} "$@" ${only[@]+"${only[@]}"}
}

pytest=("$python" -m pytest -q --tb short -p no:cacheprovider -c "$root/setup.cfg" --rootdir "$root")

run_stage() {
    local status=0 tool cases select=${only[1]:-}
    case $1 in
        1)
            local files=("$root"/tests/kernels/test_*_numeric.py) side=() models
            [[ -n ${DRY:-} ]] && files=("$root/tests/kernels/test_efficient_linear_gate_up_numeric.py")
            mapfile -t models < <(grep -rl --include='test_*.py' 'mark\.gpu' "$root/tests" | grep -v /kernels/)
            if ((jobs > 1)) && "$python" -c "import xdist" 2> "$package/xdist"; then
                # by a thread: while Python waits for a kernel that never ends, it handles no signal
                side=(--numprocesses "$jobs" --dist worksteal --timeout-method thread)
            fi
            [[ -z ${DRY:-} ]] && { limited "${pytest[@]}" -m gpu -k "$select" --timeout 120 ${side[@]+"${side[@]}"} \
                --junitxml "$out/models.xml" "${models[@]}"; status=$?; }
            limited "${pytest[@]}" -k "$select" --timeout 120 ${side[@]+"${side[@]}"} --junitxml "$out/numeric.xml" \
                "${files[@]}" || status=$?
            if command -v compute-sanitizer > /dev/null; then
                cases=("$root"/tests/kernels/test_{flash_paged_decode,efficient_linear}_numeric.py)
                for tool in memcheck initcheck; do
                    PYTORCH_NO_CUDA_MEMORY_CACHING=1 limited compute-sanitizer --tool "$tool" --error-exitcode 9 \
                        "${pytest[@]}" -k counters "${cases[@]}" || status=1
                done
            else
                echo "compute-sanitizer: not found" | tee -a "$out/gpu.log"
            fi
            return $status ;;
        2) compiled attention --quick; bench attention attention --quick ;;
        3) compiled linear --quick; bench linear linear --quick ;;
        4) bench gpu_generate generate ;;
    esac
}

if [[ $stage != all ]]; then
    run_stage "$stage"; exit $?
fi
failed=0 last=$end shares=(0 30 26 26 18)
for stage in 1 2 3 4; do
    rest=0; for share in "${shares[@]:stage}"; do rest=$((rest + share)); done
    end=$((SECONDS + (last - SECONDS) * shares[stage] / rest))
    echo "== stage $stage, for $((end - SECONDS)) seconds" | tee -a "$out/gpu.log"
    run_stage "$stage" || failed=1
done
exit $failed
