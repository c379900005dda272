#!/usr/bin/env bash
# Does asynchronous training work on this machine's GPUs? Under five minutes. Usage:
#
#     examples/gpu_check.sh [--cpu] [--out DIR] [--megatron PATH] [--timeout S]
#
# The same as `megatron-async gpu-check`, from .venv or from the environment that is active.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
installed='import importlib.util, megatron_async; raise SystemExit(not importlib.util.find_spec("torch"))'
for python in "$root/.venv/bin/python" python3 python; do
    if "$python" -c "$installed" 2>/dev/null; then
        exec "$python" -m megatron_async.tools.cli gpu-check "$@"
    fi
done
echo "$0: megatron_async is not installed: run \`make install\`, or activate its environment." >&2
exit 2
