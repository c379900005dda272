"""NorMuon and MARS against their formulas, whole and split over two tensor-parallel ranks.

Functions of ``worker.py``, which sets the ranks up.
"""

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import AdaptiveMuon

from megatron_async.optimizers.mars import MarsAdamW
from megatron_async.optimizers.normuon import TensorParallelNorMuon

TALL, WIDE, SQUARE = (12, 5), (5, 12), (6, 6)
EXACT: dict[str, Any] = {"coefficient_type": "simple", "fp32_matmul_prec": "highest"}


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
    fused: Any = torch.nn.Parameter(random(groups * sum(heights), columns, seed=0))
    fused.is_qkv = True

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        split = x.view(groups, sum(heights), columns).split(heights, dim=1)
        return [part.reshape(-1, columns) for part in split]

    separate = [torch.nn.Parameter(part.clone()) for part in parts(fused.detach())]
    muon: dict[str, Any] = {"momentum": 0.9, "scale_mode": "shape_scaling", **EXACT}
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
    settings: dict[str, Any] = {
        "lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.2,
        "nesterov": True,
        **EXACT,
    }
    results = []
    theirs = {"moment2_method": "normuon", "weight_decay_method": "decoupled"}
    both: list[tuple[Any, dict[str, str]]] = [(AdaptiveMuon, theirs), (TensorParallelNorMuon, {})]
    for cls, extra in both:
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
    vector = torch.nn.Parameter(torch.ones(3))
    matrix: Any = torch.nn.Parameter(torch.ones(3, 2))
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
    p: Any = torch.nn.Parameter(shards(random(*shape, seed=seed), dim))
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
    settings: dict[str, Any] = {"gamma": 0.3, "weight_decay": 0.1, "eps": 1e-3}
    compare_split_with_whole(MarsAdamW, settings)
    # A shard's norm is below 1, the whole matrix's is not.
    compare_split_with_whole(MarsAdamW, settings, scale=0.18)


def check_tensor_parallel_normuon() -> None:
    for rms in (None, 0.2):
        for mode in ("duplicated", "distributed"):
            settings: dict[str, Any] = {
                "tp_mode": mode,
                "update_rms": rms,
                "weight_decay": 0.1,
                **EXACT,
            }
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
