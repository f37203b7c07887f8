#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The correctness proof of the CUDA back end, on a machine with a GPU: see usage below.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
tests=$(dirname "$here")

usage() {
    cat <<'TEXT'
usage: gpu_proof.sh [--bin DIR] [--group NAME[,NAME]...] [--only TEXT] [--jobs N] [--soak SECONDS] [--logs DIR]
       gpu_proof.sh --pack DIR [--bin DIR]

Runs every check that needs a GPU, prints a line for each and at the end `N passed, N failed, N skipped`; exits 0 only when something passed and
nothing failed. What a failed check printed last is shown below its line.

  --bin DIR      where the programs are: a build folder (the default is build, beside tests), or one that holds them all side by side
  --group NAME   kernels, conformance, device, sanitizers, http, soak, failure; all by default
  --only TEXT    only checks whose name has TEXT in it
  --jobs N       checks at one time (default 4); those of device, failure and memory run alone
  --soak SECONDS how long each fixture is loaded, and kernels are run, by the group soak (default 20)
  --logs DIR     keep what the checks print there
  --pack DIR     runs nothing: puts the programs, stripped, and all else that is needed into DIR, to be carried to another machine, where
                 DIR/tests/conformance/gpu_proof.sh finds them

compute-sanitizer (for the group sanitizers) and a python3 with numpy (for http and soak) are taken from PATH.
TEXT
}

die() {
    echo "gpu_proof.sh: $*" >&2
    exit 2
}

bin=$(dirname "$tests")/build
[ -d "$(dirname "$tests")/bin" ] && bin=$(dirname "$tests")/bin
groups=kernels,conformance,device,sanitizers,http,soak,failure
only=
jobs=4
soak=20
logs=
pack=
while [ $# -gt 0 ]; do
    [ "$1" != --help ] || { usage; exit 0; }
    [ $# -ge 2 ] || die "$1 is no option or lacks its value; see --help"
    case $1 in
    --bin) bin=$2 ;;
    --group) groups=$2 ;;
    --only) only=$2 ;;
    --jobs) jobs=$2 ;;
    --soak) soak=$2 ;;
    --logs) logs=$2 ;;
    --pack) pack=$2 ;;
    *) die "unknown option $1; see --help" ;;
    esac
    shift 2
done
[ -d "$bin" ] || die "--bin: there is no folder $bin"
bin=$(cd "$bin" && pwd)

# program PATH-IN-A-BUILD-FOLDER: where it is here
program() {
    if [ -e "$bin/$1" ]; then echo "$bin/$1"; else echo "$bin/$(basename "$1")"; fi
}

programs=(server/expertd tests/bench/expert-bench tests/kernel/test_kernels_cuda tests/conformance/test_golden tests/conformance/test_promises
    tests/conformance/test_churn tests/conformance/test_replay tests/conformance/test_device_cuda tests/chaos/libtrap_on_signal.so)

if [ -n "$pack" ]; then
    mkdir -p "$pack/bin" "$pack/tests/conformance" "$pack/tests/http" || exit 1
    for p in "${programs[@]}"; do
        strip -o "$pack/bin/$(basename "$p")" "$(program "$p")" || exit 1
    done
    cp "$0" "$pack/tests/conformance/" && cp "$tests/http/harness.py" "$pack/tests/http/" &&
        cp -rL "$tests/chaos" "$tests/tools" "$tests/fixtures" "$pack/tests/" || exit 1
    du -sh "$pack"
    exit 0
fi

[ -n "$logs" ] || logs=$(mktemp -d)
mkdir -p "$logs" || exit 1
logs=$(cd "$logs" && pwd)
rm -f "$logs"/*.status "$logs"/*.pid
export EXPERTD_FIXTURES=$tests/fixtures
export EXPERTD TRAP
EXPERTD=$(program server/expertd)
TRAP=$(program tests/chaos/libtrap_on_signal.so)
export PYTHONDONTWRITEBYTECODE=1

# check NAME SECONDS COMMAND...: runs it, notes what came of it and says so
check() {
    local name=$1 limit=$2 began=$EPOCHREALTIME rc word
    shift 2
    timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1 &
    echo $! >"$logs/$name.pid"
    wait $!
    rc=$?
    rm -f "$logs/$name.pid"
    case $rc in
    0) word=passed ;;
    77) word=skipped ;;
    124 | 137) word="failed (took more than $limit s)" ;;
    *) word="failed (status $rc)" ;;
    esac
    {
        printf '%-44s %s, %.1f s\n' "$name" "$word" "$(awk -v a="$began" -v b="$EPOCHREALTIME" 'BEGIN { print b - a }')"
        [ "${word%% *}" != failed ] || tail -n 25 "$logs/$name.log" | cut -c 1-300 | sed 's/^/    /'
    } >"$logs/$name.said"
    cat "$logs/$name.said"
    echo "${word%% *}" >"$logs/$name.status"
}

# wanted GROUP NAME
wanted() {
    case ,$groups, in *,"$1",*) ;; *) return 1 ;; esac
    case $2 in *"$only"*) return 0 ;; esac
    return 1
}

# beside GROUP NAME SECONDS COMMAND...: together with others
beside() {
    wanted "$1" "$2" || return 0
    shift
    while [ "$(jobs -rp | wc -l)" -ge "$jobs" ]; do
        wait -n
    done
    check "$@" &
}

# alone GROUP NAME SECONDS COMMAND...: with nothing else on the device
alone() {
    wanted "$1" "$2" || return 0
    shift
    wait
    check "$@"
}

# Of the kernel tests' cases each run has every PARTS-th: in one run they take minutes.
PARTS=4

# sanitize TOOL CODE PART: a part of the kernel tests' small selection under a tool of compute-sanitizer, which takes minutes for all, and far
# longer where a thousand adapters have memory of their own. Its summary must be there and without a fault.
sanitize() {
    local out status
    command -v compute-sanitizer >/dev/null || return 77
    out=$(KERNEL_ADAPTERS=500 KERNEL_PART=$3/$PARTS compute-sanitizer --tool "$1" --error-exitcode 99 \
        "$(program tests/kernel/test_kernels_cuda)" --small "$2" 2>&1)
    status=$?
    echo "$out"
    [ "$status" -eq 0 ] || return "$status"
    grep -Eq 'ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)' <<<"$out" || return 98
}

# golden FIXTURE: a server of its own goes through golden_http.py
golden() {
    local log url pid status=1
    log=$(mktemp)
    "$EXPERTD" --device cuda --listen 127.0.0.1:0 --threads 2 --model "$EXPERTD_FIXTURES/$1" --adapter-root "$EXPERTD_FIXTURES/$1" 2>"$log" &
    pid=$!
    for _ in $(seq 600); do
        grep -q ' ready$' "$log" && break
        kill -0 $pid 2>/dev/null || break
        sleep 0.1
    done
    url=$(sed -n 's/^listening on //p' "$log" | head -n 1)
    if grep -q ' ready$' "$log"; then
        python3 "$tests/tools/golden_http.py" --url "$url" "$EXPERTD_FIXTURES/$1"
        status=$?
        kill -TERM $pid
    elif grep -q "can't be used" "$log"; then
        status=77
    fi
    wait $pid || [ "$status" -ne 0 ] || status=97
    cat "$log"
    rm -f "$log"
    return "$status"
}
export -f program sanitize golden
export bin tests PARTS

# Whoever ends this script ends its checks: left behind, they would share the device with what is measured next. By their numbers: a signal
# to all of this script's group has ended the shells that wait for them, but not them, which have groups of their own.
stop() {
    local file
    for file in "$logs"/*.pid; do
        [ ! -e "$file" ] || kill -TERM "$(cat "$file")" 2>/dev/null || true
    done
}
trap stop EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

kernel_test=$(program tests/kernel/test_kernels_cuda)
for code in sm90 portable; do
    for part in $(seq 0 $((PARTS - 1))); do
        beside kernels "kernels-$code-$part" 500 env KERNEL_PART="$part/$PARTS" "$kernel_test" "$code"
    done
done
for backend in cuda cuda-eager cuda-portable; do
    for t in golden promises churn; do
        beside conformance "$t-$backend" 110 "$(program "tests/conformance/test_$t")" "$backend"
    done
done
for fixture in "$EXPERTD_FIXTURES"/*/; do
    fixture=$(basename "$fixture")
    beside http "http-golden-$fixture" 100 bash -c "golden $fixture"
done
for tool in racecheck memcheck initcheck synccheck; do
    for code in sm90 portable; do
        for part in $(seq 0 $((PARTS - 1))); do
            beside sanitizers "$tool-$code-$part" 400 bash -c "sanitize $tool $code $part"
        done
    done
done
# Forwards that follow each other at once, beside all the others on the device: what goes wrong seldom, and only there.
for code in sm90 portable; do
    beside soak "kernels-soak-$code" $((soak + 60)) env SOAK_SECONDS="$soak" "$kernel_test" --soak "$code"
done
# These look at the device's free memory, which others would change.
for backend in cuda cuda-portable; do
    alone conformance "replay-$backend" 110 "$(program tests/conformance/test_replay)" "$backend"
done
alone device device-cuda 60 "$(program tests/conformance/test_device_cuda)"
for fixture in "$EXPERTD_FIXTURES"/*/; do
    fixture=$(basename "$fixture")
    beside soak "soak-$fixture" $((soak + 60)) python3 "$tests/chaos/soak.py" --expertd "$EXPERTD" --bench "$(program tests/bench/expert-bench)" \
        --device cuda --fixture "$fixture" --golden --seconds "$soak" --growth 24
done
alone failure device-cuda-hang 60 "$(program tests/conformance/test_device_cuda)" hang
alone failure device-memory 100 python3 "$tests/chaos/test_device_memory.py"
alone failure device-failure 110 python3 "$tests/chaos/test_device_failure.py"
wait

count() { cat "$logs"/*.status 2>/dev/null | grep -c "^$1"; }
passed=$(count passed)
failed=$(count failed)
echo "$passed passed, $failed failed, $(count skipped) skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
