"""The optimizers inside of Megatron's wrappers and checkpoints, on a small GPT.

Functions of ``worker.py``, which sets the ranks up.
"""

import copy
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer import emerging_optimizers as megatron_registry
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.training.training import wrap_model_chunks_with_ddp

from megatron_async import optimizers
from megatron_async.optimizers.adan import Adan
from megatron_async.optimizers.entries import _setting, put_into_megatron
from megatron_async.optimizers.mars import MarsAdamW
from megatron_async.optimizers.normuon import TensorParallelNorMuon
from tests.optimizers.formula_checks import close, random, same, shards

HYPERPARAMETERS = {
    "adan_beta1": 0.9,
    "adan_beta2": 0.8,
    "adan_beta3": 0.95,
    "adan_eps": 1e-4,
    "mars_beta1": 0.9,
    "mars_beta2": 0.95,
    "mars_eps": 1e-4,
    "mars_gamma": 0.3,
    "nadamw_beta1": 0.95,
    "nadamw_beta2": 0.9,
    "nadamw_eps": 1e-4,
    "nadamw_momentum_decay": 2.0,
    "normuon_beta2": 0.9,
    "muon_momentum": 0.9,
    "muon_tp_mode": "duplicated",
    "muon_fp32_matmul_prec": "highest",
}


def check_registration() -> None:
    registry = megatron_registry._EMERGING_OPTIMIZERS
    put_into_megatron()
    entries = {name: registry[name] for name in optimizers.own_names()}
    put_into_megatron()
    assert all(registry[name] is entry for name, entry in entries.items())
    registry["mars"] = entries["adan"]  # as if a later Megatron had one of its own
    put_into_megatron()
    assert registry["mars"] is entries["adan"]
    registry["mars"] = entries["mars"]

    from megatron.training import global_vars

    config = OptimizerConfig(lr=0.1)
    assert _setting(config, "adan_beta1") == 0.98
    global_vars._GLOBAL_ARGS = SimpleNamespace(adan_beta1=0.5)
    try:
        assert _setting(config, "adan_beta1") == 0.5
        config.adan_beta1 = 0.25
        assert _setting(config, "adan_beta1") == 0.25
    finally:
        global_vars._GLOBAL_ARGS = None


def use_tensor_parallel_size(size: int) -> None:
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_world_size() == size:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    model_parallel_cuda_manual_seed(1)


class Training:
    """A GPT of one layer, its optimizer in Megatron's wrapper, and gradients from a table."""

    def __init__(
        self,
        name: str,
        *,
        bf16: bool = False,
        layer_wise: bool = False,
        layout: bool = False,
        clip: float = 1.0,
    ) -> None:
        torch.manual_seed(0)
        put_into_megatron()
        model_config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=4,
            num_query_groups=2,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        )
        model: Any = GPTModel(
            config=model_config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=32,
            max_sequence_length=8,
        )
        self.names = [name for name, _ in model.named_parameters()]
        for index, p in enumerate(model.parameters()):
            p.data.copy_(self._local(p, seed=index) * 0.1)
        self.gpt = model
        self.model = wrap_model_chunks_with_ddp(
            [Float16Module(model_config, model) if bf16 else model],
            model_config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            use_layer_wise_distributed_optimizer=layer_wise,
            use_layer_wise_param_layout=layout,
        )[0]
        config = OptimizerConfig(
            optimizer=name,
            lr=0.05,
            min_lr=0.05,
            weight_decay=0.1,
            clip_grad=clip,
            bf16=bf16,
            use_layer_wise_distributed_optimizer=layer_wise,
        )
        for key, value in HYPERPARAMETERS.items():
            setattr(config, key, value)
        self.optimizer = get_megatron_optimizer(config, [self.model])
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]  # the scheduler's part
        self.params = list(model.parameters())

    @staticmethod
    def _local(p: Any, seed: int) -> torch.Tensor:
        """The local part of a random tensor of the whole parameter's shape."""
        size = parallel_state.get_tensor_model_parallel_world_size()
        if not getattr(p, "tensor_model_parallel", False) or size == 1:
            return random(*p.shape, seed=seed)
        shape = list(p.shape)
        shape[p.partition_dim] *= size
        return shards(random(*shape, seed=seed), p.partition_dim)

    def gradient(self, index: int, step: int) -> torch.Tensor:
        return self._local(self.params[index], seed=1000 * (step + 1) + index)

    def steps(self, first: int, last: int) -> list[float]:
        """Step, and return the gradient norms."""
        norms = []
        for step in range(first, last):
            for index, p in enumerate(self.params):
                p.main_grad.copy_(self.gradient(index, step))
            done, norm, _ = self.optimizer.step()
            assert done
            norms.append(float(norm))
            for p in self.params:  # as Megatron does right after the step
                p.main_grad.zero_()
        return norms

    def sharded(self, loading: bool = False) -> dict[str, Any]:
        model = self.gpt.sharded_state_dict()
        state = self.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata={"chained_optim_avoid_prefix": True}
        )
        return {"model": model, "optimizer": state}


def is_embedding(p: torch.Tensor) -> bool:
    return getattr(p, "is_embedding_or_output_parameter", False)


def owner(name: str, p: torch.Tensor) -> str:
    """Which algorithm trains a parameter under ``--optimizer NAME``."""
    if name in ("adan", "nadamw") or (name == "mars" and p.ndim == 2):
        return name
    if name == "normuon" and p.ndim == 2 and not is_embedding(p):
        return name
    return "adam"


def reference(name: str, params: list[Any], owners: list[str]) -> list[torch.optim.Optimizer]:
    """The bare torch optimizers that Megatron's should be equal to."""
    decay: dict[str, Any] = {"weight_decay": 0.1}
    groups: dict[str, list[dict[str, Any]]] = {}
    for p, which in zip(params, owners, strict=True):
        entry = {"params": [p], **({"weight_decay": 0.0} if p.ndim == 1 else {})}
        groups.setdefault(which, []).append(entry)
    make: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adan": lambda g: Adan(g, lr=0.05, betas=(0.9, 0.8, 0.95), eps=1e-4, **decay),
        "mars": lambda g: MarsAdamW(g, 0.05, betas=(0.9, 0.95), eps=1e-4, gamma=0.3, **decay),
        "nadamw": lambda g: torch.optim.NAdam(
            g,
            lr=0.05,
            betas=(0.95, 0.9),
            eps=1e-4,
            momentum_decay=2.0,
            decoupled_weight_decay=True,
            **decay,
        ),
        "adam": lambda g: torch.optim.AdamW(g, lr=0.05, betas=(0.9, 0.999), eps=1e-8, **decay),
        "normuon": lambda g: TensorParallelNorMuon(
            g,
            lr=0.05,
            momentum=0.9,
            nesterov=False,
            beta2=0.9,
            split_qkv=True,
            is_qkv_fn=lambda p: getattr(p, "is_qkv", False),
            qkv_split_shapes=[8, 4, 4],
            fp32_matmul_prec="highest",
            **decay,
        ),
    }
    assert name in groups
    return [make[which](entries) for which, entries in groups.items()]


def compare_with_bare_optimizer(name: str, *, bf16: bool) -> None:
    training = Training(name, bf16=bf16)
    copies = []
    for p in training.params:
        twin: Any = torch.nn.Parameter(p.detach().float().clone())
        twin.is_qkv = getattr(p, "is_qkv", False)
        copies.append(twin)
    assert any(twin.is_qkv for twin in copies)
    bare = reference(name, copies, [owner(name, p) for p in training.params])
    norms = training.steps(0, 3)
    assert min(norms) > 1.0  # so that clipping is active
    for step, norm in enumerate(norms):
        for index, twin in enumerate(copies):
            twin.grad = training.gradient(index, step) / (norm + 1e-6)
        for optimizer in bare:
            optimizer.step()
    for p, twin in zip(training.params, copies, strict=True):
        if bf16:
            main = getattr(p, "main_param")  # noqa: B009
            assert main.dtype is torch.float32
            close(main, twin)
            same(p, main.bfloat16())
        else:
            close(p, twin)


def check_megatron_fp32() -> None:
    use_tensor_parallel_size(1)
    for name in optimizers.own_names():
        compare_with_bare_optimizer(name, bf16=False)


def check_megatron_bf16() -> None:
    use_tensor_parallel_size(1)
    for name in optimizers.own_names():
        compare_with_bare_optimizer(name, bf16=True)


def check_megatron_layer_wise() -> None:
    """Whole parameters spread over data-parallel ranks: the same as all on every rank.

    Without clipping, since the two add up the gradient norm in another order.
    """
    use_tensor_parallel_size(1)
    cases = [(name, False) for name in optimizers.own_names()] + [("normuon", True)]
    for name, layout in cases:
        plain = Training(name, bf16=True, clip=0.0)
        spread = Training(name, bf16=True, clip=0.0, layer_wise=True, layout=layout)
        plain.steps(0, 3)
        spread.steps(0, 3)
        for p, q in zip(plain.params, spread.params, strict=True):
            same(q, p)


def shared_folder() -> tempfile.TemporaryDirectory[str] | None:
    return tempfile.TemporaryDirectory() if dist.get_rank() == 0 else None


def from_rank_0(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def with_prefixes(states: dict[str, Any]) -> dict[str, Any]:
    for name, state in states.items():
        add_prefix_for_sharding(state, f"{name}.")
    return states


def save(trainings: dict[str, Training], path: Path) -> None:
    if dist.get_rank() == 0:
        path.mkdir()
    dist.barrier()
    states = with_prefixes({name: training.sharded() for name, training in trainings.items()})
    dist_checkpointing.save(states, str(path))


def load(trainings: dict[str, Training], path: Path) -> None:
    targets = with_prefixes({name: t.sharded(loading=True) for name, t in trainings.items()})
    states = dist_checkpointing.load(targets, str(path))
    for name, training in trainings.items():
        training.gpt.load_state_dict(states[name]["model"])
        training.optimizer.load_state_dict(states[name]["optimizer"])


def flat_state(training: Training) -> list[torch.Tensor]:
    """All parameters and all of the optimizers' tensors, in a fixed order."""
    tensors = list(training.params)
    for part in training.optimizer.chained_optimizers:
        entries = part.state_dict()
        for state in entries.get("optimizer", entries)["state"].values():
            tensors += [state[key] for key in sorted(state)]
        tensors += [p for group in entries.get("fp32_from_fp16_params", []) for p in group]
    return tensors


def compare(left: dict[str, Training], right: dict[str, Training], how: Any) -> None:
    for name in left:
        pairs = zip(flat_state(left[name]), flat_state(right[name]), strict=True)
        for index, (a, b) in enumerate(pairs):
            try:
                how(b, a)
            except AssertionError as error:
                raise AssertionError(f"{name}, tensor {index}: {error}") from None


def check_checkpoint_torch_dist() -> None:
    use_tensor_parallel_size(1)
    folder = shared_folder()
    path = Path(from_rank_0(folder and folder.name)) / "saved"
    running = {name: Training(name, bf16=True) for name in optimizers.own_names()}
    for training in running.values():
        training.steps(0, 2)
    untouched = {n: [t.clone() for t in flat_state(r)] for n, r in running.items()}
    save(running, path)
    for name, tensors in untouched.items():
        for before, now in zip(tensors, flat_state(running[name]), strict=True):
            same(now, before)
    resumed = {name: Training(name, bf16=True) for name in optimizers.own_names()}
    load(resumed, path)
    compare(running, resumed, same)
    for training in (*running.values(), *resumed.values()):
        training.steps(2, 4)
    compare(running, resumed, same)
    # The torch format: a plain state dict.
    for name, training in running.items():
        file = io.BytesIO()
        torch.save(copy.deepcopy(training.optimizer.state_dict()), file)
        file.seek(0)
        other = Training(name, bf16=True)
        other.optimizer.load_state_dict(torch.load(file, weights_only=False))
        for p, q in zip(other.params, training.params, strict=True):
            p.data.copy_(q.data)
        other.steps(4, 5)
        training.steps(4, 5)
        compare({name: training}, {name: other}, same)


def check_checkpoint_of_another_tensor_parallel_size() -> None:
    """Two steps whole, one split, against three steps whole; there and back through files."""
    use_tensor_parallel_size(1)
    folder = shared_folder()
    path = Path(from_rank_0(folder and folder.name))
    whole = {name: Training(name) for name in optimizers.own_names()}
    for training in whole.values():
        training.steps(0, 2)
    save(whole, path / "whole")
    use_tensor_parallel_size(2)
    split = {name: Training(name) for name in optimizers.own_names()}
    load(split, path / "whole")
    for training in split.values():
        training.steps(2, 3)
    save(split, path / "split")
    use_tensor_parallel_size(1)
    back = {name: Training(name) for name in optimizers.own_names()}
    load(back, path / "split")
    continued = {name: Training(name) for name in optimizers.own_names()}
    load(continued, path / "whole")
    for training in continued.values():
        training.steps(2, 3)
    compare(continued, back, close)
