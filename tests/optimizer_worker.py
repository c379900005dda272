"""The checks of test_optimizers.py that need Megatron, on two CPU ranks.

Runs the checks named on its command line and prints for each ``check [NAME, ERROR]``, ERROR being
empty or a traceback.
"""

import copy
import io
import json
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_async import cpu_backend

cpu_backend.install()

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding  # noqa: E402
from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer import emerging_optimizers as megatron_registry  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.training.training import wrap_model_chunks_with_ddp  # noqa: E402

from megatron_async import optimizers  # noqa: E402
from megatron_async.optimizers.adan import Adan  # noqa: E402
from megatron_async.optimizers.mars import MarsAdamW  # noqa: E402
from megatron_async.optimizers.normuon import TensorParallelNorMuon  # noqa: E402
from megatron_async.optimizers.registry import _setting  # noqa: E402

TALL, WIDE, SQUARE = (12, 5), (5, 12), (6, 6)
EXACT = {"coefficient_type": "simple", "fp32_matmul_prec": "highest"}
HYPERPARAMETERS = {
    "adan_beta1": 0.9,
    "adan_beta2": 0.8,
    "adan_beta3": 0.95,
    "adan_eps": 1e-4,
    "mars_beta1": 0.9,
    "mars_beta2": 0.95,
    "mars_eps": 1e-4,
    "mars_gamma": 0.3,
    "normuon_beta2": 0.9,
    "muon_momentum": 0.9,
    "muon_tp_mode": "duplicated",
    "muon_fp32_matmul_prec": "highest",
}


def close(actual: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-5) -> None:
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=rtol, atol=rtol * 0.1)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=0, atol=0)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def steps(optimizer: torch.optim.Optimizer, params: list[Any], first: int, last: int) -> None:
    """Step with gradients that depend on the step and the parameter's position alone."""
    for step in range(first, last):
        for index, p in enumerate(params):
            p.grad = random(*p.shape, seed=100 * step + index)
        optimizer.step()


# ---- NorMuon's formula, written from the paper and the authors' code ----


def newton_schulz(x: torch.Tensor) -> torch.Tensor:
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def published_normuon(
    w: torch.Tensor,
    gradients: list[torch.Tensor],
    *,
    lr: float,
    decay: float,
    nesterov: bool,
    update_rms: float | None,
) -> torch.Tensor:
    momentum, beta2 = 0.9, 0.8
    m, v = torch.zeros_like(w), torch.zeros(w.size(0))
    for g in gradients:
        m = momentum * m + (1 - momentum) * g
        o = newton_schulz((1 - momentum) * g + momentum * m if nesterov else m)
        v = beta2 * v + (1 - beta2) * (o * o).mean(dim=1)
        adapted = o / v.sqrt()[:, None]
        if update_rms is None:  # the authors' code
            scale = o.norm() / adapted.norm() * max(1, w.size(0) / w.size(1)) ** 0.5
        else:  # Algorithm 1
            scale = update_rms * (w.size(0) * w.size(1)) ** 0.5 / adapted.norm()
        w = w - lr * decay * w - lr * scale * adapted
    return w


def compare_with_published(nesterov: bool, update_rms: float | None) -> None:
    params = [torch.nn.Parameter(random(*s, seed=i)) for i, s in enumerate((TALL, WIDE, SQUARE))]
    start = [p.detach().clone() for p in params]
    optimizer = TensorParallelNorMuon(
        params,
        lr=0.1,
        momentum=0.9,
        nesterov=nesterov,
        weight_decay=0.2,
        beta2=0.8,
        update_rms=update_rms,
        scale_mode="shape_scaling",
        **EXACT,
    )
    for count in range(1, 5):
        steps(optimizer, params, count - 1, count)
        for index, p in enumerate(params):
            gradients = [random(*p.shape, seed=100 * step + index) for step in range(count)]
            expected = published_normuon(
                start[index], gradients, lr=0.1, decay=0.2, nesterov=nesterov, update_rms=update_rms
            )
            close(p, expected)


def check_formula() -> None:
    compare_with_published(nesterov=True, update_rms=None)


def check_formula_of_algorithm_1() -> None:
    compare_with_published(nesterov=False, update_rms=0.2)


def check_fused_qkv_counts_as_three_matrices() -> None:
    groups, heights, columns = 2, [4, 2, 2], 6
    fused = torch.nn.Parameter(random(groups * sum(heights), columns, seed=0))
    fused.is_qkv = True

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        split = x.view(groups, sum(heights), columns).split(heights, dim=1)
        return [part.reshape(-1, columns) for part in split]

    separate = [torch.nn.Parameter(part.clone()) for part in parts(fused.detach())]
    muon = {"momentum": 0.9, "scale_mode": "shape_scaling", **EXACT}
    for rms in (None, 0.2):
        ours = TensorParallelNorMuon(
            [fused],
            lr=0.1,
            update_rms=rms,
            split_qkv=True,
            is_qkv_fn=lambda p: p.is_qkv,
            qkv_split_shapes=heights,
            **muon,
        )
        theirs = TensorParallelNorMuon(separate, lr=0.1, update_rms=rms, **muon)
        for step in range(3):
            fused.grad = random(*fused.shape, seed=step)
            for p, g in zip(separate, parts(fused.grad), strict=True):
                p.grad = g.clone()
            ours.step()
            theirs.step()
            for part, p in zip(parts(fused.detach()), separate, strict=True):
                close(part, p)


def with_adaptive_muon(shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix after three steps of AdaptiveMuon's "normuon" and of ours."""
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True, **EXACT}
    results = []
    for cls, extra in (
        (AdaptiveMuon, {"moment2_method": "normuon", "weight_decay_method": "decoupled"}),
        (TensorParallelNorMuon, {}),
    ):
        p = torch.nn.Parameter(random(*shape, seed=0))
        steps(cls([p], beta2=0.9, **settings, **extra), [p], 0, 3)
        results.append(p.detach())
    return results[0], results[1]


def check_agreement_with_adaptive_muon_on_tall_matrices() -> None:
    for shape in (TALL, SQUARE):
        close(*with_adaptive_muon(shape))


def check_adaptive_muon_is_another_algorithm_on_wide_matrices() -> None:
    theirs, ours = with_adaptive_muon(WIDE)
    assert (theirs - ours).abs().max() > 1e-2
    # It has a second moment for each column: ours of the transposed matrix.
    p = torch.nn.Parameter(random(*WIDE, seed=0).T.contiguous())
    optimizer = TensorParallelNorMuon(
        [p], lr=0.1, momentum=0.9, weight_decay=0.2, nesterov=True, beta2=0.9, **EXACT
    )
    for step in range(3):
        p.grad = random(*WIDE, seed=100 * step).T.contiguous()
        optimizer.step()
    close(p.T, theirs)


def check_normuon_state_round_trip() -> None:
    shapes = (TALL, WIDE)
    params = [torch.nn.Parameter(random(*s, seed=i)) for i, s in enumerate(shapes)]
    optimizer = TensorParallelNorMuon(params, lr=0.1)
    steps(optimizer, params, 0, 3)
    optimizer.state[params[0]]["delay_correction_update"] = torch.full(TALL, 3.0)
    state = optimizer.state_dict()
    for index, shape in enumerate(shapes):
        assert optimizer.state[params[index]]["second_moment"].shape == (shape[0], 1)
        moment = state["state"][index]["second_moment"]
        assert moment.shape == shape
        assert moment.stride(1) == 0
    file = io.BytesIO()
    torch.save((state, params), file)
    file.seek(0)
    state, resumed = torch.load(file, weights_only=False)
    again = TensorParallelNorMuon(resumed, lr=0.1)
    again.prepare_for_load()
    for index, shape in enumerate(shapes):
        target = again.state_dict()["state"][index]["second_moment"]
        target.copy_(random(*shape, seed=0))  # memory of its own: a load writes into it
    again.load_state_dict(state)
    assert (again.state[resumed[0]]["delay_correction_update"] == 3.0).all()
    steps(optimizer, params, 3, 6)
    steps(again, resumed, 3, 6)
    for p, q in zip(params, resumed, strict=True):
        same(p, q)
    unloaded = [torch.nn.Parameter(random(*s, seed=i)) for i, s in enumerate(shapes)]
    prepared = TensorParallelNorMuon(unloaded, lr=0.1)
    prepared.prepare_for_load()
    steps(prepared, unloaded, 0, 6)
    for p, q in zip(params, unloaded, strict=True):
        same(p, q)
    assert prepared.state[unloaded[0]]["second_moment"].shape == (TALL[0], 1)


def refused(message: str, function: Any) -> None:
    with pytest.raises(ValueError, match=message):
        function()


def check_normuon_refuses_what_it_cannot_do() -> None:
    vector, matrix = (torch.nn.Parameter(torch.ones(s)) for s in ((3,), (3, 2)))
    refused("matrices", lambda: steps(TensorParallelNorMuon([vector], lr=0.1), [vector], 0, 1))
    matrix.is_gtp_weight_remat = True
    refused("gtp_remat", lambda: steps(TensorParallelNorMuon([matrix], lr=0.1), [matrix], 0, 1))
    refused("beta2", lambda: TensorParallelNorMuon([matrix], beta2=1.0))
    refused("eps", lambda: TensorParallelNorMuon([matrix], eps=0.0))
    refused("update_rms", lambda: TensorParallelNorMuon([matrix], update_rms=0.0))


# ---- tensor parallelism ----


def shards(whole: torch.Tensor, dim: int) -> torch.Tensor:
    return whole.chunk(dist.get_world_size(), dim=dim)[dist.get_rank()].contiguous()


def split_parameter(seed: int, dim: int, shape: tuple[int, int] = (8, 6)) -> Any:
    p = torch.nn.Parameter(shards(random(*shape, seed=seed), dim))
    p.tensor_model_parallel, p.partition_dim = True, dim
    return p


def compare_split_with_whole(cls: type, settings: dict[str, Any], scale: float = 1.0) -> None:
    """Two split matrices, an expert's and a replicated one, against all of them whole."""
    groups = SimpleNamespace(
        tp=dist.group.WORLD, expt_tp=dist.new_group([0, 1]), gtp_remat=None, expt_gtp_remat=None
    )
    whole = [torch.nn.Parameter(random(8, 6, seed=i)) for i in range(4)]
    split = [split_parameter(i, dim) for i, dim in enumerate((0, 1, 0))]
    split[2].expert_tp = True
    split.append(torch.nn.Parameter(whole[3].detach().clone()))
    reference = cls(whole, lr=0.1, **settings)
    ours = cls(split, lr=0.1, pg_collection=groups, **settings)
    for step in range(4):
        for index, (p, q) in enumerate(zip(whole, split, strict=True)):
            p.grad = scale * random(8, 6, seed=50 * step + index)
            q.grad = p.grad.clone() if index == 3 else shards(p.grad, q.partition_dim)
        reference.step()
        ours.step()
    for index, (p, q) in enumerate(zip(whole, split, strict=True)):
        close(q, p if index == 3 else shards(p, q.partition_dim))


def check_tensor_parallel_mars() -> None:
    settings = {"gamma": 0.3, "weight_decay": 0.1, "eps": 1e-3}
    compare_split_with_whole(MarsAdamW, settings)
    # A shard's norm is below 1, the whole matrix's is not.
    compare_split_with_whole(MarsAdamW, settings, scale=0.18)


def check_tensor_parallel_normuon() -> None:
    for rms in (None, 0.2):
        for mode in ("duplicated", "distributed"):
            settings = {"tp_mode": mode, "update_rms": rms, "weight_decay": 0.1, **EXACT}
            compare_split_with_whole(TensorParallelNorMuon, settings)
    # Blockwise, a shard is a matrix of its own.
    groups = SimpleNamespace(tp=dist.group.WORLD, gtp_remat=None)
    block, alone = split_parameter(0, 0), split_parameter(0, 0)
    steps(
        TensorParallelNorMuon([block], lr=0.1, tp_mode="blockwise", pg_collection=groups),
        [block],
        *(0, 3),
    )
    alone.partition_dim = -1
    steps(TensorParallelNorMuon([alone], lr=0.1), [alone], 0, 3)
    same(block, alone)


# ---- inside of Megatron ----


def check_registration() -> None:
    registry = megatron_registry._EMERGING_OPTIMIZERS
    optimizers.register()
    entries = {name: registry[name] for name in optimizers.NAMES}
    optimizers.register()
    assert all(registry[name] is entry for name, entry in entries.items())
    registry["mars"] = entries["adan"]  # as if a later Megatron had one of its own
    optimizers.register()
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
        optimizers.register()
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
    def _local(p: torch.Tensor, seed: int) -> torch.Tensor:
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
    if name == "adan" or (name == "mars" and p.ndim == 2):
        return name
    if name == "normuon" and p.ndim == 2 and not is_embedding(p):
        return name
    return "adam"


def reference(name: str, params: list[Any], owners: list[str]) -> list[torch.optim.Optimizer]:
    """The bare torch optimizers that Megatron's should be equal to."""
    decay = {"weight_decay": 0.1}
    groups: dict[str, list[dict[str, Any]]] = {}
    for p, which in zip(params, owners, strict=True):
        entry = {"params": [p], **({"weight_decay": 0.0} if p.ndim == 1 else {})}
        groups.setdefault(which, []).append(entry)
    make = {
        "adan": lambda g: Adan(g, lr=0.05, betas=(0.9, 0.8, 0.95), eps=1e-4, **decay),
        "mars": lambda g: MarsAdamW(g, 0.05, betas=(0.9, 0.95), eps=1e-4, gamma=0.3, **decay),
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
        twin = torch.nn.Parameter(p.detach().float().clone())
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
    for name in optimizers.NAMES:
        compare_with_bare_optimizer(name, bf16=False)


def check_megatron_bf16() -> None:
    use_tensor_parallel_size(1)
    for name in optimizers.NAMES:
        compare_with_bare_optimizer(name, bf16=True)


def check_megatron_layer_wise() -> None:
    """Whole parameters spread over data-parallel ranks: the same as all on every rank.

    Without clipping, since the two add up the gradient norm in another order.
    """
    use_tensor_parallel_size(1)
    cases = [(name, False) for name in optimizers.NAMES] + [("normuon", True)]
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
    running = {name: Training(name, bf16=True) for name in optimizers.NAMES}
    for training in running.values():
        training.steps(0, 2)
    untouched = {n: [t.clone() for t in flat_state(r)] for n, r in running.items()}
    save(running, path)
    for name, tensors in untouched.items():
        for before, now in zip(tensors, flat_state(running[name]), strict=True):
            same(now, before)
    resumed = {name: Training(name, bf16=True) for name in optimizers.NAMES}
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
    whole = {name: Training(name) for name in optimizers.NAMES}
    for training in whole.values():
        training.steps(0, 2)
    save(whole, path / "whole")
    use_tensor_parallel_size(2)
    split = {name: Training(name) for name in optimizers.NAMES}
    load(split, path / "whole")
    for training in split.values():
        training.steps(2, 3)
    save(split, path / "split")
    use_tensor_parallel_size(1)
    back = {name: Training(name) for name in optimizers.NAMES}
    load(back, path / "split")
    continued = {name: Training(name) for name in optimizers.NAMES}
    load(continued, path / "whole")
    for training in continued.values():
        training.steps(2, 3)
    compare(continued, back, close)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        try:
            globals()[f"check_{name}"]()
            error = ""
        except Exception:
            error = f"rank {dist.get_rank()}: {traceback.format_exc()}"
        print("check", json.dumps([name, error]), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
