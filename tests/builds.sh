#!/usr/bin/env bash
# Runs what computes with the CPU's kernels once for each build of them, and says which builds were tried.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
told=() status=0
while read -r build lacks; do
    if [ -n "$lacks" ]; then
        told+=("$build: not tried: this CPU lacks $lacks")
        continue
    fi
    echo "kernels: $build"
    if MOESAIC_KERNELS=$build .venv/bin/pytest -q -n 2 --dist loadfile \
        -m 'kernels and not suite and not slow and not gpu and not compose' "$@" tests; then
        told+=("$build: passed")
    else
        told+=("$build: failed") status=1
    fi
done < <(.venv/bin/python -c '
from moesaic.native.compile import VARIANTS, lacking
for name in VARIANTS:
    print(name, ", ".join(sorted(lacking(name))))')
printf '%s\n' "${told[@]}"
exit $status
