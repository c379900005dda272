"""The checks of test_optimizers.py that need Megatron, on two CPU ranks.

Runs the checks named on its command line and prints for each ``check [NAME, ERROR]``, ERROR being
empty or a traceback.
"""

import json
import sys
import traceback

from megatron_async import cpu_backend

cpu_backend.install()  # before anything of Megatron is imported

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.optimizers import formula_checks, megatron_checks  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checks = {**vars(formula_checks), **vars(megatron_checks)}
    for name in sys.argv[1:]:
        try:
            checks[f"check_{name}"]()
            error = ""
        except Exception:
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        print("check", json.dumps([name, error]), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
