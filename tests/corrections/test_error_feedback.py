"""The delay correction: its numbers, its identity, and in Megatron's wrappers."""

import copy
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_async.corrections.base import UPDATE, correction_of
from megatron_async.corrections.error_feedback import ErrorFeedback
from tests.support.torchrun import run_torchrun

Weights = list[torch.Tensor]


def _corrected(optimizer: torch.optim.Optimizer, strength: float = 1.0) -> ErrorFeedback:
    correction = ErrorFeedback(optimizer, strength=strength)
    correction.enable()
    return correction


def _step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor | None]) -> Weights:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else gradient.clone()
    optimizer.step()
    return [p.detach().clone() for p in parameters]


def _trajectory(
    make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    start: Weights,
    gradients: Sequence[Weights],
    *,
    strength: float | None,
) -> list[Weights]:
    """x_0, x_1, ... with the given gradients; uncorrected if ``strength`` is None."""
    optimizer = make([torch.nn.Parameter(value.clone()) for value in start])
    if strength is not None:
        _corrected(optimizer, strength)
    return [start, *(_step(optimizer, gradient) for gradient in gradients)]


def _updates(iterates: list[Weights]) -> list[Weights]:
    return [
        [old - new for old, new in zip(before, after, strict=True)]
        for before, after in itertools.pairwise(iterates)
    ]


def _gradients(shapes: Sequence[tuple[int, ...]], steps: int = 8) -> list[Weights]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(shape, generator=generator) * 10.0 ** (k % 3 - 1) for shape in shapes]
        for k in range(steps)
    ]


SHAPES = ((8, 6), (6, 6))
START = [torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(0, 2, 36).view(6, 6)]


def test_numbers() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    _corrected(optimizer)
    found = [float(_step(optimizer, [torch.tensor(u)])[0]) for u in (1.0, 10.0, 100.0)]
    assert found == [-1.0, -20.0, -210.0]


@pytest.mark.parametrize(
    ("strength", "wanted"),
    [(0.0, [-1, -11, -111]), (0.5, [-1, -15.5, -160.5]), (2.0, [-1, -29, -309])],
)
def test_numbers_by_strength(strength: float, wanted: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    _corrected(optimizer, strength)
    assert [float(_step(optimizer, [torch.tensor(u)])[0]) for u in (1.0, 10.0, 100.0)] == wanted


def _muon(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from emerging_optimizers.orthogonalized_optimizers import Muon

    return Muon(parameters, lr=0.1, weight_decay=0.0, fp32_matmul_prec="highest")


def _soap(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from emerging_optimizers.soap import SOAP

    return SOAP(parameters, lr=0.1, weight_decay=0.0)


def _lion(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from emerging_optimizers.scalar_optimizers import Lion

    return Lion(parameters, lr=0.1, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0, fused=True),
    "muon": _muon,
    "soap": _soap,
    "lion": _lion,
}


@pytest.mark.parametrize("strength", [0.5, 1.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_identity(name: str, strength: float) -> None:
    """x_{k+1} = y_{k+1} - lambda (U_k - U_0), with y the iterates of the optimizer as it is."""
    gradients = _gradients(SHAPES)
    plain = _trajectory(OPTIMIZERS[name], START, gradients, strength=None)
    corrected = _trajectory(OPTIMIZERS[name], START, gradients, strength=strength)
    updates = _updates(plain)
    for k, update in enumerate(updates):
        for x, y, now, first in zip(
            corrected[k + 1], plain[k + 1], update, updates[0], strict=True
        ):
            torch.testing.assert_close(x, y - strength * (now - first), rtol=1e-5, atol=2e-6)
    changes = [float((x - y).abs().max()) for x, y in zip(corrected[-1], plain[-1], strict=True)]
    assert max(changes) > 1e-2, "the correction changed nothing"


def test_recursion_with_weight_decay() -> None:
    """x_{k+1} = x_k - U_k - lambda (U_k - U_{k-1}), U_k taken at the un-looked-ahead point."""
    strength, decay, rate = 0.5, 0.1, 0.1
    gradients = _gradients(SHAPES)
    found = _trajectory(
        lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=decay),
        START,
        gradients,
        strength=strength,
    )
    # Adam's own part of an update does not depend on the weights.
    zeros = [torch.zeros(shape) for shape in SHAPES]
    adam = _updates(_trajectory(OPTIMIZERS["adam"], zeros, gradients, strength=None))
    for i, x in enumerate(START):
        last = torch.zeros_like(x)
        for k, own in enumerate(adam):
            ahead = x + strength * last
            update = own[i] + rate * decay * ahead
            x = ahead - update - (strength * update if k > 0 else 0.0)
            last = update
            torch.testing.assert_close(found[k + 1][i], x, rtol=1e-5, atol=2e-6)


def test_parameter_without_gradient_has_a_zero_update() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(())) for _ in range(2)], lr=1.0)
    _corrected(optimizer)
    one = torch.ones(())
    assert [float(x) for x in _step(optimizer, [one, one])] == [-1.0, -1.0]
    # x_2 = x_1 - 0 - (0 - 1) for the second.
    assert [float(x) for x in _step(optimizer, [10 * one, None])] == [-20.0, 0.0]


def test_empty_parameters_are_left_alone() -> None:
    empty, full = torch.nn.Parameter(torch.zeros(0)), torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([empty, full], lr=1.0)
    _corrected(optimizer)
    for update in (1.0, 10.0):
        _step(optimizer, [torch.zeros(0), torch.tensor(update)])
    assert full.item() == -20.0


def test_acts_only_when_enabled() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    correction = ErrorFeedback(optimizer)
    # Synchronous steps are not corrected, and the first asynchronous one is a first update.
    found = [float(_step(optimizer, [torch.tensor(u)])[0]) for u in (1.0, 10.0)]
    assert found == [-1.0, -11.0]
    assert UPDATE not in next(iter(optimizer.state.values()), {})
    correction.enable()
    found = [float(_step(optimizer, [torch.tensor(u)])[0]) for u in (1.0, 10.0, 100.0)]
    assert found == [-12.0, -31.0, -221.0]


def test_goes_on_from_a_saved_buffer() -> None:
    """The state dict of the torch optimizer holds the buffer; what was added is known beside it."""
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.0)
    _corrected(optimizer, 0.5)
    for update in (1.0, 10.0):
        _step(optimizer, [torch.tensor(update)])
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = torch.optim.SGD([torch.nn.Parameter(parameter.detach().clone())], lr=1.0)
    resumed.load_state_dict(saved)
    correction = ErrorFeedback(resumed, strength=2.0)
    correction.load_state_dict({"started": True, "applied": 0.5})
    # x_3 = x_2 + 0.5 * 10 - 100 - 2 * 100
    assert float(_step(resumed, [torch.tensor(100.0)])[0]) == -15.5 + 5.0 - 300.0


def test_measures_its_size() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2, 3))], lr=1.0)
    correction = _corrected(optimizer, 0.5)
    correction.measure = True
    _step(optimizer, [torch.ones(2, 3)])
    assert correction.squares is None  # the first update has no correction
    _step(optimizer, [torch.full((2, 3), 4.0)])
    assert correction.squares is not None
    change, size = correction.squares
    assert float(change) == pytest.approx(6 * (0.5 * (4 - 1)) ** 2)
    assert float(size) == pytest.approx(6 * 4.0**2)


class _Operations(TorchDispatchMode):
    """Counts what PyTorch would launch, each of which is a kernel or a few on a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


def _operations(parameters: int, *, corrected: bool, measure: bool = False) -> int:
    """In the third step, which is like all others; with those of the harness."""
    optimizer = torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(5, 7)) for _ in range(parameters)], lr=0.1, foreach=True
    )
    correction = _corrected(optimizer) if corrected else None
    for gradient in _gradients([(5, 7)] * parameters, steps=2):
        _step(optimizer, gradient)
    if correction is not None:
        correction.measure = measure
    (gradients,) = _gradients([(5, 7)] * parameters, steps=1)
    with _Operations() as operations:
        _step(optimizer, gradients)
    return operations.number


def test_only_measuring_takes_kernels_of_each_parameter() -> None:
    def for_eight_more(**settings: bool) -> int:
        return _operations(9, **settings) - _operations(1, **settings)

    without = for_eight_more(corrected=False)
    assert for_eight_more(corrected=True) == without
    assert for_eight_more(corrected=True, measure=True) >= without + 8 * 10


def test_one_buffer_for_each_parameter() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(5, 7))], lr=0.1)
    _corrected(optimizer)
    for gradient in _gradients([(5, 7)], steps=3):
        _step(optimizer, gradient)
    (state,) = optimizer.state.values()
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", UPDATE}
    assert state[UPDATE].shape == (5, 7)
    assert state[UPDATE].dtype == torch.float32


def test_is_found_by_its_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    assert correction_of(optimizer) is None
    correction = ErrorFeedback(optimizer)
    assert correction_of(optimizer) is correction


def test_a_changed_strength_takes_back_what_was_added() -> None:
    # x_2 = x_0 - U_0 - U_1 - (U_1 - U_0), and x_3 without the look-ahead of update 1, but with half
    # of that of update 2.
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    correction = ErrorFeedback(optimizer, strength=1.0)
    correction.enable()

    def step(gradient: float) -> float:
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
        return float(parameter.detach())

    assert [step(1.0), step(10.0)] == [-1.0, -20.0]
    resumed = torch.optim.SGD([parameter], lr=1.0)
    after = ErrorFeedback(resumed, strength=0.5)
    assert correction_of(resumed) is after
    assert not after.buffered
    after.make_buffers()
    assert after.buffered
    resumed.state[parameter][UPDATE].copy_(optimizer.state[parameter][UPDATE])
    after.load_state_dict(correction.state_dict())
    optimizer = resumed
    assert step(100.0) == -1.0 - 10.0 - 100.0 + 1.0 - 50.0


def test_refuses_what_is_no_torch_optimizer() -> None:
    not_torch: Any = object()
    with pytest.raises(TypeError, match=r"--delay-correction needs a torch\.optim\.Optimizer"):
        ErrorFeedback(not_torch)


# After each step, the one value of all elements of each of the two weights.
VALUES = {
    "error-feedback": [-1.0, -20.0, -210.0],
    "adaptive": [-4.0, -3.0, -1.0, 5.0],
    "weight-prediction": [-2.0, -21.0, -211.0],
    "nesterov": [-0.75, -2.375, -5.6875],
    # The second gradient is compensated to 2 - 2^2 and turns round, the third to 2 + 10 * 2^2.
    "delay-compensation": [-1.0, 9.0, -91.0],
}
WRAPPERS = {
    "fp32": "FP32Optimizer",
    "bf16": "Float16OptimizerWithFloat16Params",
    "distributed fp32": "DistributedOptimizer",
    "distributed bf16": "DistributedOptimizer",
}


@pytest.fixture(scope="module")
def wrapped() -> dict[str, Any]:
    result = run_torchrun(1, [], script=Path(__file__).with_name("in_wrappers.py"))
    (line,) = [line for line in result.ranks[0].stdout.splitlines() if line.startswith("FOUND ")]
    found: dict[str, Any] = json.loads(line.removeprefix("FOUND "))
    return found


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("correction", VALUES)
def test_numbers_in_megatrons_wrappers(wrapped: dict[str, Any], correction: str, name: str) -> None:
    found = wrapped[correction][name]
    assert found["outer"] == "ChainedOptimizer"
    assert found["links"] == [WRAPPERS[name]] * 2
    wanted = torch.tensor(VALUES[correction])
    if name.endswith("bf16"):
        wanted = wanted.bfloat16().float()
    assert found["values"] == [[[value], [value]] for value in wanted.tolist()]
