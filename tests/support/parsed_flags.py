"""Parses command lines as training would, on a pretended machine of H100 GPUs.

:func:`parse` starts this module in a process of its own. Standard input: a JSON list of
{"argv": [...], "world_size": N}. Standard output: one JSON object a line with some of the parsed
arguments.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_async import hooks
from tests.support.torchrun import environment

__all__ = ["parse"]


def parse(jobs: Sequence[tuple[Sequence[str], int]]) -> list[dict[str, Any]]:
    """Return what the parsers and checks of Megatron and of the package make of command lines.

    Args:
        jobs: (arguments, number of ranks) of each.
    """
    given = [{"argv": list(argv), "world_size": ranks} for argv, ranks in jobs]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.parsed_flags"],
        env=environment(),
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(jobs)
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def main() -> None:
    jobs = json.load(sys.stdin)
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    hooks.install()
    from megatron.training.arguments import parse_args, validate_args

    for job in jobs:
        os.environ["WORLD_SIZE"] = str(job["world_size"])
        sys.argv = ["pretrain_gpt.py", *job["argv"]]
        args = parse_args()
        validate_args(args)
        names = (
            *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size"),
            *("num_query_groups", "untie_embeddings_and_output_weights", "lr", "min_lr"),
            *("global_batch_size", "data_parallel_size", "train_samples", "seq_length"),
            *("lr_warmup_samples", "pipeline_schedule", "delay_correction", "optimizer", "bf16"),
        )
        print("RESULT " + json.dumps({name: getattr(args, name) for name in names}), flush=True)


if __name__ == "__main__":
    main()
