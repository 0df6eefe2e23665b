#!/usr/bin/env bash
# Runs what computes with the CPU's kernels once for each build of them, and says which builds were tried.
#
# AFTER_OTHERS=1 says that other tests have run with the best build that this CPU has: it is left out, and the others
# run those cases of matrices that the quick tier chooses.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Kernels, panels, sizes and plans; but for what runs kernels of GPUs, or builds of its own.
tests=(
    tests/kernels tests/native tests/models/layers tests/models/configuration/test_sizes.py
    tests/models/weights/formats/test_models.py tests/experts/test_wire_rows.py tests/moesaic_lab/simulation/edge/test_native.py
    tests/cli/suite/test_memory_plan.py tests/cli/edge/test_sizes.py
    --ignore=tests/kernels/triton --ignore=tests/kernels/test_segment_graphs.py --ignore=tests/native/test_sanitized.py
    --ignore=tests/models/layers/test_warm_up.py --ignore=tests/models/layers/test_decode_segments.py
)
choice=()
if [ -n "${AFTER_OTHERS:-}" ]; then
    choice=(-p tests.tiers.plugin --tier=quick "--tier-part=$((0x0$(git rev-parse HEAD | cut -c1-8) % 16))")
fi
told=() status=0 lacked=0
while read -r build lacks; do
    if [ -n "$lacks" ]; then
        told+=("$build: not tried: this CPU lacks $lacks")
        lacked=${#told[@]}
        continue
    fi
    if [ ${#told[@]} = "$lacked" ] && [ -n "${AFTER_OTHERS:-}" ]; then
        told+=("$build: passed before, in other tests")
        continue
    fi
    echo "kernels: $build"
    if MOESAIC_KERNELS=$build .venv/bin/pytest -q -n 2 --dist loadfile "${choice[@]}" \
        -m 'not suite and not slow and not gpu and not compose' "$@" "${tests[@]}" < /dev/null; then
        told+=("$build: passed")
    else
        told+=("$build: failed") status=1
    fi
done < <(.venv/bin/python -c '
from moesaic.native.compile import VARIANTS, lacking
for name in VARIANTS:
    print(name, ", ".join(sorted(lacking(name))))')
[ ${#told[@]} -gt 0 ] || status=1
printf 'kernels %s\n' "${told[@]}" | tee .venv/builds.log
exit $status
