"""Parses command lines as training would, on a pretended machine of H100 GPUs.

Standard input: a JSON list of {"argv": [...], "world_size": N}. Standard output: one JSON object a
line with some of the parsed arguments.
"""

import json
import os
import sys
from types import SimpleNamespace

import torch

from megatron_async import hooks


def main() -> None:
    jobs = json.load(sys.stdin)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0)
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
