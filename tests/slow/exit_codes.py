"""Runs many tiny jobs to their end, each under a torchrun of its own, and counts their exit codes.

    python -m tests.slow.exit_codes [--jobs 300] [--busy 0] [--layouts NAME ...]

A job takes some 10 s on two idle cores.
"""

import argparse
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping

from tests.support.gpt import ASYNC, Value, gpt_args
from tests.support.torchrun import run_torchrun

FLAGS: dict[str, Value] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 128,
    "global_batch_size": 8,
    "train_iters": 3,
}
EVALUATED: dict[str, Value] = {"eval_iters": 1, "eval_interval": 2}
OVERLAPS: dict[str, Value] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}

# Number of ranks, launcher, flags.
LAYOUTS: Mapping[str, tuple[int, str, dict[str, Value]]] = {
    "pp2": (2, "plugin", {**ASYNC, "pipeline_model_parallel_size": 2}),
    "dp2": (2, "plugin", {**ASYNC, **OVERLAPS, **EVALUATED}),
    "pp4": (
        4,
        "plugin",
        {
            **ASYNC,
            **EVALUATED,
            "num_layers": 5,
            "pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": "Et|tt|t|tL",
            "optimizer": "muon",
        },
    ),
    "dp2-unevaluated": (2, "plugin", {**ASYNC, **OVERLAPS}),
    "pp2-synchronous": (2, "plain", {**EVALUATED, "pipeline_model_parallel_size": 2}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--busy", type=int, default=0, help="processes that keep cores busy")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    args = parser.parse_args()
    spinning = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(spinning) for _ in range(args.busy)]
    start = time.monotonic()
    codes: Counter[tuple[str, int | None]] = Counter()
    try:
        for number in range(args.jobs):
            name = args.layouts[number % len(args.layouts)]
            ranks, launcher, flags = LAYOUTS[name]
            argv = gpt_args(**{**FLAGS, **flags})
            result = run_torchrun(ranks, argv, launcher=launcher, check=False)
            codes[name, result.returncode] += 1
            if result.returncode != 0:
                print(f"job {number} ({name}): {result.describe()}", flush=True)
    finally:
        for hog in hogs:
            hog.kill()
    minutes = (time.monotonic() - start) / 60
    for (name, code), count in sorted(codes.items(), key=str):
        print(f"{name}: {count} jobs ended with {code}")
    good = sum(count for (_, code), count in codes.items() if code == 0)
    print(f"{good} of {args.jobs} jobs exited with 0, in {minutes:.0f} minutes")
    return 0 if good == args.jobs else 1


if __name__ == "__main__":
    sys.exit(main())
