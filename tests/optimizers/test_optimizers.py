"""Adan, MARS, NAdamW and NorMuon against their published formulas, and inside of Megatron.

What needs Megatron runs in one two-rank job of ``worker.py``; its checks are listed here.
"""

import argparse
import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async import optimizers
from megatron_async.optimizers.adan import Adan
from megatron_async.optimizers.mars import MarsAdamW
from megatron_async.optimizers.nadamw import MomentumSchedule, NAdamW
from tests.support.gpt import REPOSITORY, gpt_args
from tests.support.torchrun import run_torchrun

SHAPES = ((5, 3), (4,), (2, 3, 2))
# A step's learning rate comes from a schedule.
RATES = (0.1, 0.07, 0.2, 0.05, 0.01, 0.03)


def numpy_adan(
    x: Any, gradients: Any, rates: Any, *, betas: Any, eps: Any, weight_decay: Any
) -> Any:
    """Algorithm 1 of arXiv 2208.06677, with its betas (1 minus ours), bias-corrected."""
    beta1, beta2, beta3 = (1 - beta for beta in betas)
    m, v, n = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    last = gradients[0]
    for k, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = (1 - beta1) * m + beta1 * g
        v = (1 - beta2) * v + beta2 * (g - last)
        n = (1 - beta3) * n + beta3 * (g + (1 - beta2) * (g - last)) ** 2
        m_hat = m / (1 - (1 - beta1) ** k)
        v_hat = v / (1 - (1 - beta2) ** k)
        n_hat = n / (1 - (1 - beta3) ** k)
        rate = lr / (np.sqrt(n_hat) + eps)
        x = (x - rate * (m_hat + (1 - beta2) * v_hat)) / (1 + weight_decay * lr)
        last = g
    return x


def numpy_mars(
    x: Any, gradients: Any, rates: Any, *, betas: Any, eps: Any, weight_decay: Any, gamma: Any
) -> Any:
    """MARS-AdamW of arXiv 2411.10438 with the gradient of the last batch, x_0 = x_1."""
    beta1, beta2 = betas
    m, v = np.zeros_like(x), np.zeros_like(x)
    last = gradients[0]
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        c = g + gamma * beta1 / (1 - beta1) * (g - last)
        norm = np.sqrt((c * c).sum())
        if norm > 1:
            c = c / norm
        m = beta1 * m + (1 - beta1) * c
        v = beta2 * v + (1 - beta2) * c * c
        m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
        x = x - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * x)
        last = g
    return x


def numpy_nadamw(
    x: Any,
    gradients: Any,
    rates: Any,
    *,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    momentum_decay: Any,
) -> Any:
    """NAdam as Dozat has it in "Incorporating Nesterov Momentum into Adam", Algorithm 2, with the
    schedule of mu of section 3.2 and torch's decoupled weight decay."""
    mu = [betas[0] * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in range(1, len(rates) + 2)]
    m, n = np.zeros_like(x), np.zeros_like(x)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        n = betas[1] * n + (1 - betas[1]) * g * g
        g_hat, m_hat = g / (1 - np.prod(mu[:t])), m / (1 - np.prod(mu[: t + 1]))
        n_hat = n / (1 - betas[1] ** t)
        m_bar = (1 - mu[t - 1]) * g_hat + mu[t] * m_hat
        x = (1 - lr * weight_decay) * x - lr * m_bar / (np.sqrt(n_hat) + eps)
    return x


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in SHAPES
    ]


def gradients_for(
    params: list[torch.nn.Parameter], steps: int, scale: float = 1.0
) -> list[list[torch.Tensor]]:
    """One list for each step."""
    generator = torch.Generator().manual_seed(2)
    return [
        [
            (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)
            for p in params
        ]
        for _ in range(steps)
    ]


def train(
    optimizer: torch.optim.Optimizer,
    gradients: list[list[torch.Tensor]],
    rates: tuple[float, ...] = RATES,
) -> None:
    """Step as Megatron does: ``grad`` is a view of a buffer that is zeroed after the step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step, lr in zip(gradients, rates, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        for p in params:
            p.grad.zero_()


ADAN: dict[str, Any] = {"betas": (0.9, 0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
MARS: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1, "gamma": 0.3}
NADAMW: dict[str, Any] = {
    "betas": (0.95, 0.9),
    "eps": 1e-3,
    "weight_decay": 0.1,
    "momentum_decay": 5.0,
}
ADAN_MARS = [(Adan, ADAN, numpy_adan), (MarsAdamW, MARS, numpy_mars)]
BOTH = pytest.mark.parametrize(("cls", "settings", "formula"), ADAN_MARS)
EACH = pytest.mark.parametrize(
    ("cls", "settings", "formula"), [*ADAN_MARS, (NAdamW, NADAMW, numpy_nadamw)]
)


@EACH
@pytest.mark.parametrize("scale", [0.05, 1.0])  # MARS's clipping inactive and active
def test_every_step_follows_the_published_formula(
    cls: Any, settings: Any, formula: Any, scale: Any
) -> None:
    params = parameters()
    start = [p.detach().numpy().copy() for p in params]
    gradients = gradients_for(params, len(RATES), scale)
    optimizer = cls(params, **settings)
    for count in range(1, len(RATES) + 1):
        train(optimizer, gradients[count - 1 : count], RATES[count - 1 : count])
        for index, p in enumerate(params):
            expected = formula(
                start[index],
                [step[index].numpy() for step in gradients[:count]],
                RATES[:count],
                **settings,
            )
            np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-12, atol=1e-14)


def test_mars_clips_each_tensor_by_its_own_norm() -> None:
    params = parameters()
    gradients = gradients_for(params, 1)
    gradients[0][0].mul_(100)
    optimizer = MarsAdamW(params, **MARS)
    train(optimizer, gradients)
    norms = [float(optimizer.state[p]["exp_avg"].norm()) / (1 - MARS["betas"][0]) for p in params]
    unclipped = float(gradients[0][1].norm())
    assert norms[0] == pytest.approx(1.0)
    assert norms[1] == pytest.approx(min(1.0, unclipped))


def test_adan_without_nesterov_term_is_adam() -> None:
    ours, theirs = parameters(), parameters()
    gradients = gradients_for(ours, len(RATES))
    train(Adan(ours, betas=(0.9, 0.0, 0.95), eps=1e-3), gradients)
    train(torch.optim.Adam(theirs, betas=(0.9, 0.95), eps=1e-3), gradients)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_adan_of_an_unchanging_gradient_is_adam() -> None:
    ours, theirs = parameters(), parameters()
    gradients = gradients_for(ours, 1) * len(RATES)
    train(Adan(ours, betas=(0.9, 0.7, 0.95), eps=1e-3), gradients)
    train(torch.optim.Adam(theirs, betas=(0.9, 0.95), eps=1e-3), gradients)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_mars_without_correction_is_adamw() -> None:
    ours, theirs = parameters(), parameters()
    gradients = gradients_for(ours, len(RATES), scale=0.05)
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    train(MarsAdamW(ours, gamma=0.0, **settings), gradients)
    train(torch.optim.AdamW(theirs, **settings), gradients)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_nadamw_is_torchs_nadam_with_decoupled_weight_decay(decay: Any) -> None:
    ours, theirs = parameters(), parameters()
    gradients = gradients_for(ours, len(RATES))
    settings: dict[str, Any] = {
        "betas": (0.99, 0.999),
        "momentum_decay": 0.004,
        "weight_decay": decay,
    }
    train(NAdamW(ours, **settings), gradients)
    train(torch.optim.NAdam(theirs, decoupled_weight_decay=True, **settings), gradients)
    for p, q in zip(ours, theirs, strict=True):
        # torch keeps the product of mu in fp32.
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_nadamws_momentum_is_a_function_of_the_step() -> None:
    schedule = MomentumSchedule(0.9, 2.0)
    # By hand: 0.9 (1 - 0.96^2 / 2) = 0.48528 and 0.9 (1 - 0.96^4 / 2) = 0.517794048.
    assert schedule.momentum(1) == pytest.approx(0.48528)
    assert schedule.product(2) == pytest.approx(0.48528 * 0.517794048)
    far = schedule.product(100)
    assert schedule.product(1) == pytest.approx(0.48528)
    assert schedule.product(100) == far == MomentumSchedule(0.9, 2.0).product(100)


@pytest.mark.parametrize("cls", [Adan, MarsAdamW])
def test_first_step_moves_each_element_by_the_learning_rate(cls: Any) -> None:
    # m / sqrt(n) is the gradient's sign whatever its size: by hand, 1 - 0.1 and -2 + 0.1.
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    p.grad = torch.tensor([0.3, -0.004], dtype=torch.float64)
    cls([p], lr=0.1, eps=0.0).step()
    assert p.tolist() == pytest.approx([0.9, -1.9])


@BOTH
def test_a_gradient_that_comes_late_starts_without_a_change(
    cls: Any, settings: Any, formula: Any
) -> None:
    p, late = (torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    optimizer = cls([p, late], lr=0.1, **settings)
    p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    assert late not in optimizer.state
    assert torch.equal(late, torch.ones_like(late))
    late.grad = torch.full_like(late, 0.25)
    optimizer.step()
    assert torch.equal(optimizer.state[late]["previous_grad"], late.grad)
    if cls is Adan:
        assert not optimizer.state[late]["exp_avg_diff"].any()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_deterministic_and_keep_the_dtype(
    cls: Any, settings: Any, formula: Any, dtype: Any
) -> None:
    results = []
    for _ in range(2):
        params = parameters(dtype)
        optimizer = cls(params, **settings)
        train(optimizer, gradients_for(params, len(RATES)))
        results.append(params)
        for p in params:
            assert p.dtype is dtype
            assert torch.isfinite(p).all()
            assert {t.dtype for t in optimizer.state[p].values()} == {dtype}
    for p, q in zip(*results, strict=True):
        assert torch.equal(p, q)


@EACH
def test_a_saved_and_loaded_state_goes_on_exactly(
    cls: Any, settings: Any, formula: Any, tmp_path: Path
) -> None:
    params = parameters(torch.float32)
    gradients = gradients_for(params, len(RATES))
    optimizer = cls(params, **settings)
    train(optimizer, gradients[:3])
    torch.save((optimizer.state_dict(), params), tmp_path / "saved.pt")
    train(optimizer, gradients[3:], RATES[3:])

    state, resumed = torch.load(tmp_path / "saved.pt", weights_only=False)
    for entries in state["state"].values():
        for tensor in entries.values():
            assert isinstance(tensor, torch.Tensor)
    assert [group["step"] for group in state["param_groups"]] == [3]
    again = cls(resumed, **settings)
    again.load_state_dict(state)
    train(again, gradients[3:], RATES[3:])
    for p, q in zip(params, resumed, strict=True):
        assert torch.equal(p, q)


@EACH
def test_state_of_another_owner_is_neither_read_nor_lost(
    cls: Any, settings: Any, formula: Any
) -> None:
    # The delay correction keeps its buffer there, perhaps from before the first gradient.
    plain, shared = parameters(), parameters()
    gradients = gradients_for(plain, 2)
    train(cls(plain, **settings), gradients)
    optimizer = cls(shared, **settings)
    for p in shared:
        optimizer.state[p]["other"] = torch.full_like(p, 7.0)
    train(optimizer, gradients)
    for p, q in zip(plain, shared, strict=True):
        assert torch.equal(p, q)
        assert (optimizer.state[q]["other"] == 7.0).all()


@pytest.mark.parametrize(
    ("cls", "settings", "named"),
    [
        (Adan, {"betas": (0.9, 1.0, 0.9)}, "betas"),
        (Adan, {"lr": -1.0}, "lr"),
        (MarsAdamW, {"betas": (-0.1, 0.9)}, "betas"),
        (MarsAdamW, {"gamma": -1.0}, "gamma"),
        (NAdamW, {"betas": (0.9, 1.0)}, "betas"),
        (NAdamW, {"momentum_decay": math.inf}, "momentum_decay"),
    ],
)
def test_hyperparameters_out_of_range_are_refused(cls: Any, settings: Any, named: Any) -> None:
    with pytest.raises(ValueError, match=named):
        cls(parameters(), **settings)


@pytest.mark.parametrize("cls", [Adan, MarsAdamW, NAdamW])
def test_a_closure_is_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="closure"):
        cls(parameters()).step(lambda: 0.0)


@pytest.mark.parametrize(("cls", "settings"), [(Adan, ADAN), (MarsAdamW, MARS), (NAdamW, NADAMW)])
def test_a_copy_is_independent(cls: Any, settings: Any) -> None:
    params = parameters()
    optimizer = cls(params, **settings)
    train(optimizer, gradients_for(params, 1))
    twin = copy.deepcopy(optimizer)
    before = [q.clone() for group in twin.param_groups for q in group["params"]]
    train(optimizer, gradients_for(params, 2))
    after = [q for group in twin.param_groups for q in group["params"]]
    for p, q in zip(before, after, strict=True):
        assert torch.equal(p, q)


def test_flags_reach_a_parser_and_its_optimizer_choices() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", default="adam", choices=["adam", "soap"])
    assert optimizers.add_optimizer_arguments(parser) is parser
    args = parser.parse_args(["--optimizer", "adan", "--adan-beta1", "0.9", "--mars-gamma", "0.1"])
    assert (args.optimizer, args.adan_beta1, args.adan_beta2) == ("adan", 0.9, 0.92)
    assert (args.mars_gamma, args.normuon_update_rms) == (0.1, None)
    # OptimizerConfig's own defaults.
    assert (args.soap_shampoo_beta, args.soap_use_kl_shampoo) == (0.95, True)
    assert parser.parse_args(["--optimizer", "soap"]).optimizer == "soap"
    # A second time nothing is added.
    assert optimizers.add_optimizer_arguments(parser) is parser
    choices = parser._option_string_actions["--optimizer"].choices
    assert choices is not None
    assert list(choices) == ["adam", "soap", *optimizers.own_names()]
    with pytest.raises(SystemExit):
        parser.parse_args(["--optimizer", "nosuch"])


def test_flags_that_megatron_has_itself_are_left_to_it() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--soap-shampoo-beta", type=float, default=0.5)
    assert optimizers.add_optimizer_arguments(parser).parse_args([]).soap_shampoo_beta == 0.5


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--optimizer", "adan"], True),
        (["--optimizer=normuon", "--lr", "1"], True),
        (["--optimizer", "adam", "--mars-gamma=0.1"], True),
        (["--optimizer", "adam", "--optimizer", "mars"], True),
        (["--no-soap-use-kl-shampoo"], True),
        (["--optimizer", "muon", "--save", "adan"], False),
        (["--optimizer"], False),
        ([], False),
    ],
)
def test_a_command_line_asks_for_these_optimizers(argv: Any, wanted: Any) -> None:
    assert optimizers.requested(argv) is wanted


def test_importing_the_package_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_async.optimizers; "
        "print([n for n in ('torch', 'megatron') if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
    )
    assert result.stdout.strip() == "[]"


CHECKS = (
    "formula",
    "formula_of_algorithm_1",
    "fused_qkv_counts_as_three_matrices",
    "agreement_with_adaptive_muon_on_tall_matrices",
    "adaptive_muon_is_another_algorithm_on_wide_matrices",
    "normuon_state_round_trip",
    "normuon_refuses_what_it_cannot_do",
    "registration",
    "tensor_parallel_mars",
    "tensor_parallel_normuon",
    "megatron_fp32",
    "megatron_bf16",
    "megatron_layer_wise",
    "checkpoint_torch_dist",
    "checkpoint_of_another_tensor_parallel_size",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Name of each check -> what went wrong on the first rank where something did, or ""."""
    job = run_torchrun(2, CHECKS, launcher="none", script=Path(__file__).with_name("worker.py"))
    found: dict[str, str] = {}
    for rank in job.ranks:
        for line in rank.stdout.splitlines():
            if line.startswith("check "):
                name, error = json.loads(line.removeprefix("check "))
                found[name] = found.get(name) or error
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_in_megatron(outcomes: Any, name: Any) -> None:
    if outcomes[name]:
        pytest.fail(outcomes[name], pytrace=False)


ASYNCHRONOUS: dict[str, Any] = {
    "num_layers": 2,
    "global_batch_size": 4,
    "train_iters": 5,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "pipeline_schedule": "pipedream-2bw",
    "delay_correction": "error-feedback",
    "ckpt_format": "torch_dist",
}
PIPELINE: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "adan_beta1": 0.97,
    "mars_gamma": 0.03,
}


@pytest.mark.parametrize("name", ["adan", "mars", "nadamw"])
def test_asynchronous_training_through_the_launcher(name: Any) -> None:
    job = run_torchrun(2, gpt_args(**ASYNCHRONOUS, **PIPELINE, optimizer=name), launcher="plugin")
    losses = job.loss_values
    assert len(losses) == 5
    assert losses[5] < losses[1]  # not a number is not printed at all
    shown = dict(re.findall(r"^ +(\w+) \.+ (\S+)$", job.stdout, flags=re.MULTILINE))
    assert (shown["optimizer"], shown["adan_beta1"], shown["mars_gamma"]) == (name, "0.97", "0.03")


def test_asynchronous_normuon_resumes_exactly(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save": tmp_path, "save_interval": 3}
    whole = run_torchrun(
        1, gpt_args(**ASYNCHRONOUS, **saving, optimizer="normuon"), launcher="plugin"
    )
    rest = run_torchrun(
        1,
        gpt_args(**ASYNCHRONOUS, load=tmp_path, ckpt_step=3, optimizer="normuon"),
        launcher="plugin",
    )
    # In the log of an iteration is the norm of the last completed update.
    assert rest.grad_norms == [entry for entry in whole.grad_norms if entry[0] > 3]
    assert len(rest.grad_norms) == 2
    assert rest.losses[0] == whole.losses[3]
    assert rest.loss_values[5] == pytest.approx(whole.loss_values[5], abs=2e-6)


def test_defaults_are_the_published_ones() -> None:
    args = optimizers.add_optimizer_arguments(argparse.ArgumentParser()).parse_args([])
    assert (args.adan_beta1, args.adan_beta2, args.adan_beta3, args.adan_eps) == (
        *(0.98, 0.92, 0.99),
        1e-8,
    )
    assert (args.mars_beta1, args.mars_beta2, args.mars_gamma) == (0.95, 0.99, 0.025)
    assert math.isclose(args.normuon_beta2, 0.95)
    assert (args.nadamw_beta1, args.nadamw_beta2, args.nadamw_eps) == (0.99, 0.999, 1e-8)
    assert args.nadamw_momentum_decay == 0.004
