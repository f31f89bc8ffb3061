#!/usr/bin/env bash
# Builds the image and uses it: trains in it, draws a report, searches, asks TensorBoard whether it is healthy, stops it with
# SIGTERM, resumes, runs two ranks, and measures it.
#
# With Docker where an engine answers; else, as root, with buildah in chroot isolation, on a base that debootstrap makes
# and that carries the tag of the Dockerfile's, in a storage of its own. The build takes Python packages from where the
# pip of this machine takes them. What makes a second run quicker is kept in $CROSSBOW_VERIFY_CACHE (default
# ~/.cache/crossbow_py/docker) and may be deleted.
#
# Exit code: 0 passed, 1 failed, 2 there is nothing here to build with.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=$root/docker/verify
dockerfile=$root/docker/Dockerfile
cache=${CROSSBOW_VERIFY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/crossbow_py/docker}
base=$(sed -n 's/^ARG BASE=//p' "$dockerfile")
image=crossbow_py:verify
name=crossbow-verify-$$
volumes=(runs:/workspace/runs data:/data cache:/cache)
max_mb=400 # over torch, what torch needs, and the base: 369 with the versions of November 2026

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf 'docker/verify.sh: failed: %s\n' "$*" >&2
    logs 2>/dev/null | tail -n 30 >&2 || true
    exit 1
}

expect() { # WHAT WANTED GOT
    [[ $2 == "$3" ]] || fail "$1: expected $2, got $3"
    echo "$1: $3"
}

wait_until() { # WHAT SECONDS COMMAND...
    local waited
    for ((waited = 0; waited < $2; waited++)); do
        if "${@:3}" >/dev/null 2>&1; then return; fi
        sleep 1
    done
    fail "after $2 s there is still no $1"
}

summary() { # RUN KEY
    inside python -c "import json; print(json.load(open('runs/$1/summary.json'))['$2'])"
}

epochs_trained() { # RUN NUMBER
    inside python -c "import sys; sys.exit(len(open('runs/$1/metrics.jsonl').readlines()) < $2)"
}

of_tensorboard() { # KEYS of its service in compose.yaml, a word a line
    inside python -c "import sys, yaml; print(*yaml.safe_load(sys.stdin)['services']['tensorboard']$1, sep='\n')" \
        <"$root/docker/compose.yaml"
}

stop() { # RUN, which is running. Ranks have 90 s in the image to write their checkpoint; digits need far less.
    terminate
    wait_until "end within a minute of SIGTERM" 60 ended
    stopped=$(exit_code)
    expect "status after SIGTERM" terminated "$(summary "$1" status)"
    inside sh -c "ls runs/$1/checkpoints" | sed 's/^/checkpoint: /' | tail -n 1 | grep . || fail "SIGTERM left no checkpoint"
    trained_before=$(summary "$1" samples_seen)
}

if docker info >/dev/null 2>&1; then
    engine=docker
elif [[ $(id -u) == 0 ]] && command -v buildah >/dev/null && command -v debootstrap >/dev/null; then
    engine=buildah
else
    echo "docker/verify.sh: neither a Docker engine answers, nor are buildah and debootstrap here and this is root" >&2
    exit 2
fi
work=$(mktemp -d)
# shellcheck source-path=SCRIPTDIR source=verify/buildah.sh
. "$tools/$engine.sh"

clean_up() {
    remove_all >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if command -v hadolint >/dev/null; then
    say "hadolint"
    hadolint "$dockerfile"
fi
if docker compose version >/dev/null 2>&1; then
    say "docker compose config"
    docker compose --file "$root/docker/compose.yaml" --profile '*' config --quiet
fi

say "build with $engine"
SECONDS=0
python3 -m pip config list 2>/dev/null | python3 "$tools/pip_conf.py" >"$work/pip.conf"
build
echo "built in $SECONDS s"

say "size"
layers
inside_base python - <"$tools/measure.py" >"$work/base.json"
inside python - --base "$(<"$work/base.json")" --max-mb "$max_mb" <"$tools/measure.py" || fail "the image is too large"

say "train"
SECONDS=0
trained +experiment=digits max_epochs=8 output_dir=runs/short
echo "took $SECONDS s"
expect "status" finished "$(summary short status)"
inside python -c "import sys; sys.exit($(summary short test_accuracy) < 0.95)" || fail "test accuracy is under 0.95"
inside sh -c 'ls /cache/crossbow_py/native/*.so' || fail "gcc did not compile the update of the replicas"
expect "user" 1000:1000 "$(inside id -u):$(inside id -g)"

say "report and search"
inside python -m crossbow_py.report runs/short || fail "no report"
inside test -s runs/short/report/report.html || fail "the report has no page"
inside python -m crossbow_py.search +experiment=search_digits +debug=search_fast output_dir=runs/search || fail "no search"
inside python -c "import psycopg" || fail "the driver of PostgreSQL is missing"

say "TensorBoard"
mapfile -t serve < <(of_tensorboard "['entrypoint']")
mapfile -t healthy < <(of_tensorboard "['healthcheck']['test'][1:]")
if inside "${healthy[@]}" 2>/dev/null; then fail "another TensorBoard answers on its port"; fi
start_command "${serve[@]}"
wait_until "healthy TensorBoard" 60 inside_running "${healthy[@]}"
echo "healthy, by the check of compose.yaml"
terminate
wait_until "end of TensorBoard" 20 ended

say "SIGTERM"
long=(+experiment=digits output_dir=runs/long)
start_trainer "${long[@]}" max_epochs=100000
wait_until "second epoch" 120 epochs_trained long 2
inside_running python - <"$tools/listening.py" || fail "something listens on a public address"
stop long
expect "exit code" 143 "$stopped"

say "resume"
epochs=$(($(inside sh -c 'wc -l <runs/long/metrics.jsonl') + 3))
trained "${long[@]}" max_epochs=$epochs resume=auto
expect "status" finished "$(summary long status)"
(($(summary long samples_seen) > trained_before)) || fail "the resumed run went back to the start"

say "two ranks by torchrun"
ranks=(--standalone --local-addr=127.0.0.1 --nproc-per-node=2 -m crossbow_py.train +experiment=digits output_dir=runs/ranks)
start_command torchrun "${ranks[@]}" max_epochs=100000
wait_until "second epoch" 180 epochs_trained ranks 2
inside_running python - <"$tools/listening.py" || fail "something listens on a public address"
stop ranks
echo "exit code of torchrun: $stopped"
epochs=$(($(inside sh -c 'wc -l <runs/ranks/metrics.jsonl') + 3))
start_command torchrun "${ranks[@]}" max_epochs=$epochs resume=auto
wait_until "end of the resumed ranks" 180 ended
expect "exit code" 0 "$(exit_code)"
expect "status" finished "$(summary ranks status)"
expect "devices" 2 "$(summary ranks num_devices)"
(($(summary ranks samples_seen) > trained_before)) || fail "the resumed ranks went back to the start"

printf '\ndocker/verify.sh: passed\n'
