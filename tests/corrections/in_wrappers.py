"""Steps Megatron's optimizers with the delay corrections on one CPU rank; prints JSON.

For each correction and each of Megatron's wrappers: the class of each link of the optimizer that it
builds, and the value of every weight after each update. The optimizer is Adam without memory, whose
update is the learning rate, with the gradient's sign.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MegatronModule, TransformerConfig

from megatron_async.megatron.optimizers import inner_optimizers
from tests.corrections.building import make_correction

UPDATES = (1.0, 10.0, 100.0)
CASES: dict[str, tuple[dict[str, Any], Sequence[float]]] = {
    "error-feedback": ({"name": "error-feedback"}, UPDATES),
    "adaptive": ({"name": "error-feedback", "adaptive_strength": True}, (4.0, 2.0, -1.0, -3.0)),
    "weight-prediction": ({"name": "weight-prediction"}, UPDATES),
    "nesterov": ({"name": "nesterov", "momentum": 0.5}, (1.0, 2.0, 4.0)),
    "delay-compensation": ({"name": "delay-compensation"}, UPDATES),
}
"""Name -> settings of the correction, and the updates."""


class TwoWeights(MegatronModule):
    """A weight, and one of an expert, which Megatron gives an optimizer of its own."""

    def __init__(self, config: TransformerConfig, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
        self.expert = torch.nn.Parameter(torch.zeros(2, 4, dtype=dtype))
        self.expert.allreduce = False  # type: ignore[attr-defined]


def run(case: str, *, bf16: bool, distributed: bool) -> dict[str, Any]:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, bf16=bf16, num_moe_experts=2
    )
    model = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(use_distributed_optimizer=distributed),
        TwoWeights(config, torch.bfloat16 if bf16 else torch.float32),
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1.0,
            weight_decay=0.0,
            adam_beta1=0.0,
            adam_beta2=0.0,
            adam_eps=0.0,
            clip_grad=0.0,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=distributed,
        ),
        [model],
    )
    settings, updates = CASES[case]
    leaves = inner_optimizers(optimizer)
    for leaf in leaves:
        make_correction(optimizer=leaf.optimizer, **settings).enable()
    values = []
    for update in updates:
        for group in optimizer.param_groups:
            group["lr"] = abs(update)
        model.zero_grad_buffer()
        for parameter in model.parameters():
            parameter.main_grad.fill_(2.0 if update > 0 else -2.0)
        optimizer.step()
        values.append(
            [sorted(set(p.detach().float().flatten().tolist())) for p in model.parameters()]
        )
    return {
        "outer": type(optimizer).__name__,
        "links": [type(leaf).__name__ for leaf in leaves],
        "values": values,
    }


def main() -> None:
    torch.distributed.init_process_group()
    parallel_state.initialize_model_parallel()
    found = {
        case: {
            "fp32": run(case, bf16=False, distributed=False),
            "bf16": run(case, bf16=True, distributed=False),
            "distributed fp32": run(case, bf16=False, distributed=True),
            "distributed bf16": run(case, bf16=True, distributed=True),
        }
        for case in CASES
    }
    print("FOUND", json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
