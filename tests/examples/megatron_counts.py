"""Counts the parameters of models that Megatron builds on the meta device, from command lines.

Standard input: a JSON list of {"argv": [...], "world_size": N}. The last line of standard output: a
JSON list of counts. The model is built whole, on one rank, so that nothing is counted twice.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

# Layers of torch, which need no GPU library to be built.
_LOCAL = (
    *("--transformer-impl", "local", "--attention-backend", "unfused"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
    "--no-rope-fusion",
)


def main() -> None:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_async import hooks

    cuda: Any = torch.cuda
    tensor: Any = torch.Tensor
    cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0)
    cuda.current_device = lambda: torch.device("meta")
    cuda.Stream = lambda *_, **__: None  # the token dispatcher makes one
    tensor.cuda = lambda self, *_, **__: self
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    hooks.install()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training.arguments import (
        core_transformer_config_from_args,
        parse_args,
        validate_args,
    )

    new_group = dist.new_group
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": None})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    counts = []
    for job in json.load(sys.stdin):
        os.environ["WORLD_SIZE"] = str(job["world_size"])
        sys.argv = ["pretrain_gpt.py", *job["argv"], *_LOCAL]
        args = parse_args()
        validate_args(args)
        args.pipeline_model_parallel_size = args.tensor_model_parallel_size = 1
        args.expert_model_parallel_size = args.expert_tensor_parallel_size = 1
        args.sequence_parallel = False
        args.pipeline_model_parallel_layout = None
        config = core_transformer_config_from_args(args)
        config.perform_initialization = False
        with torch.device("meta"):
            built: Any = GPTModel(
                config,
                get_gpt_layer_local_spec(
                    num_experts=args.num_experts, normalization=args.normalization
                ),
                vocab_size=-(-args.vocab_size // 128) * 128,
                max_sequence_length=args.max_position_embeddings,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
            )
        assert all(parameter.is_meta for parameter in built.parameters())
        counts.append(sum(parameter.numel() for parameter in built.parameters()))
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
