#!/usr/bin/env bash
# Builds the images from nothing and tests the suite in containers; what `make test-compose` runs.
#
# It takes the Docker engine that answers. Where none does, it takes one from the script MOESAIC_TEST_ENGINE, whose
# verbs are: probe, install, start build|run, base, env, in COMMAND…, stop; such an engine reaches no registry of
# images, so what it needs besides (wheels, a Redis image) is put into an overlay file under build/. Without either
# it says that the tests are skipped, and why.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
script=${MOESAIC_TEST_ENGINE:-../shared/tools/engine.sh}
work=$PWD/build/compose
within=()

skip() {
    echo "SKIPPED: the tests in containers: $*"
    exit 0
}

# Runs a verb of the script; its exit status 77 means that no engine can be had here.
engine() {
    local status=0
    bash "$script" "$@" || status=$?
    [ "$status" != 77 ] || skip "no engine can be had on this machine (see above)"
    return "$status"
}

# Builds the images of the services named, or all. Packages come over networks, so three attempts are made.
build() {
    local attempt
    for attempt in 1 2 3; do
        docker compose --profile disaggregated build "$@" >"$work/build.log" 2>&1 && return 0
        echo "images, attempt $attempt:"
        tail -n 25 "$work/build.log"
    done
    return 1
}

# Builds the images for CPUs, and one for GPUs. Its torch is the others', because that for CUDA is gigabytes.
build_all() {
    build && COMPOSE_FILE=compose.yaml:compose.gpu.yaml${COMPOSE_FILE#compose.yaml} build expert
}

overlay() {
    mkdir -p "$work/redis"
    # The interpreter of the base image may be an older 3.11 than the one here, which wants one package more. A torch
    # for CUDA requires its own triton; that for CPUs gets the one of the Makefile.
    .venv/bin/pip download -q --only-binary :all: --python-version 3.11 -d "$work/wheels" -c constraints.txt \
        '.[gateway,scheduler,attention,structured,otel]' "$(sed -n 's/^TRITON := //p' Makefile)" hatchling 'async-timeout>=4.0.3' 2>"$work/pip.log" ||
        { cat "$work/pip.log" >&2; return 1; }
    printf '[global]\nno-index = true\n' >"$work/pip.conf"
    printf '%s\n' 'FROM python:3.11-slim-bookworm' \
        'RUN apt-get -q -o Acquire::Retries=5 update' \
        'RUN apt-get -q -o Acquire::Retries=5 install -y --no-install-recommends redis-server' \
        'RUN mkdir -p /data && chown redis:redis /data' >"$work/redis/Dockerfile"
    {
        echo 'services:'
        echo "  redis: {image: moesaic-test-redis, build: {context: $work/redis, network: host}}"
        for service in gateway scheduler attention expert; do
            echo "  $service: {build: {network: host, secrets: [pip_conf], args: {TORCH_INDEX: ''}," \
                "additional_contexts: {wheels: $work/wheels}}}"
        done
        echo "secrets: {pip_conf: {file: $work/pip.conf}}"
    } >"$work/overlay.yaml"
}

export MOESAIC_TAG=test COMPOSE_FILE=compose.yaml MOESAIC_TORCH_INDEX=${MOESAIC_TORCH_INDEX-https://download.pytorch.org/whl/cpu}
if docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
    echo "engine: the one that answers here"
    mkdir -p "$work"
    build_all
elif [ -e "$script" ]; then
    engine probe
    engine install
    engine start build
    trap 'bash "$script" stop' EXIT
    eval "$(bash "$script" env)"
    engine base
    overlay
    COMPOSE_FILE=compose.yaml:$work/overlay.yaml
    build redis || skip "Debian's package redis-server cannot be installed in an image here (see above)"
    build_all
    engine start run
    within=(bash "$script" in)
else
    skip "no Docker engine answers here"
fi

python3 deploy/make_secrets.py
"${within[@]}" .venv/bin/pytest -v -m "${MARKS:-compose and not slow}" "${@:-tests/compose}"
