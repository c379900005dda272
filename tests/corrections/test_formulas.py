"""Every delay correction against its published formula, written out in plain PyTorch.

The references keep lists of iterates and know nothing of buffers. Gradients are those of a small
problem at the weights of one step ago, so that an error in what the model computes on shows, too.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from megatron_async.corrections import CORRECTIONS
from megatron_async.corrections.adaptive_error_feedback import agreement
from megatron_async.corrections.base import STATE_PREFIX, DelayCorrection, correction_of
from tests.corrections.building import make_correction, settings_of
from tests.corrections.test_error_feedback import OPTIMIZERS

type Weights = list[torch.Tensor]
type Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

SHAPES = ((8, 6), (6, 6))
STEPS = 12
STRENGTH = 0.7
MOMENTUM = 0.8

# name of the test -> settings of the correction
SETTINGS: dict[str, dict[str, Any]] = {
    "error-feedback": {"name": "error-feedback", "strength": STRENGTH},
    "adaptive-error-feedback": {
        "name": "error-feedback",
        "strength": STRENGTH,
        "adaptive_strength": True,
    },
    "weight-prediction": {"name": "weight-prediction", "strength": STRENGTH},
    "nesterov": {"name": "nesterov", "momentum": MOMENTUM},
    "delay-compensation": {"name": "delay-compensation", "strength": 3.0},
    "adaptive-delay-compensation": {
        "name": "delay-compensation",
        "strength": 2.0,
        "adaptive_strength": True,
    },
}


class Problem:
    """Least squares with other data in each step: sum over i of |A_k x_i - b_ki|^2 / 2."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.start = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self._data = [
            [
                (
                    torch.randn(5, shape[0], generator=generator) / 4,
                    torch.randn(5, shape[1], generator=generator),
                )
                for shape in SHAPES
            ]
            for _ in range(STEPS)
        ]

    def gradients(self, batch: int, weights: Weights) -> Weights:
        return [a.T @ (a @ x - b) for (a, b), x in zip(self._data[batch], weights, strict=True)]


class Updates:
    """What an optimizer subtracts for a gradient, wherever the weights are."""

    def __init__(self, make: Make) -> None:
        self._parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self._optimizer = make(self._parameters)

    def __call__(self, gradients: Weights) -> Weights:
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.data.zero_()
            p.grad = gradient.clone()
        self._optimizer.step()
        return [-p.detach().clone() for p in self._parameters]


def step(optimizer: torch.optim.Optimizer, gradients: Sequence[torch.Tensor]) -> Weights:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    return [p.detach().clone() for p in parameters]


def corrected(make: Make, start: Weights, **settings: Any) -> torch.optim.Optimizer:
    optimizer = make([torch.nn.Parameter(value.clone()) for value in start])
    make_correction(optimizer=optimizer, **settings).enable()
    return optimizer


def found_trajectory(make: Make, problem: Problem, **settings: Any) -> list[Weights]:
    """x_0, x_1, ...: what the model computes on, with gradients of one step ago."""
    optimizer = corrected(make, problem.start, **settings)
    found = [problem.start]
    for k in range(STEPS):
        found.append(step(optimizer, problem.gradients(k, found[max(k - 1, 0)])))
    return found


# The formulas


def plus(a: Weights, b: Weights, factor: float = 1.0) -> Weights:
    return [x + factor * y for x, y in zip(a, b, strict=True)]


def minus(a: Weights, b: Weights, factor: float = 1.0) -> Weights:
    return plus(a, b, -factor)


def error_feedback(
    update: Updates, problem: Problem, *, strength: float, **_: Any
) -> list[Weights]:
    xs, us = [problem.start], []
    for k in range(STEPS):
        us.append(update(problem.gradients(k, xs[max(k - 1, 0)])))
        x = minus(xs[k], us[k])
        xs.append(x if k == 0 else minus(x, minus(us[k], us[k - 1]), strength))
    return xs


def adaptive_error_feedback(
    update: Updates, problem: Problem, *, strength: float, **_: Any
) -> list[Weights]:
    def ahead(u: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        values = [
            strength * min(max(a / b, 0.0), 1.0) * a if b != 0.0 else 0.0
            for a, b in zip(u.flatten().tolist(), before.flatten().tolist(), strict=True)
        ]
        return torch.tensor(values).view_as(u)

    xs, us = [problem.start], []
    last: Weights = []
    for k in range(STEPS):
        us.append(update(problem.gradients(k, xs[max(k - 1, 0)])))
        x = minus(xs[k], us[k])
        if k == 0:
            now = [strength * u for u in us[0]]
            xs.append(x)
        else:
            now = [ahead(u, before) for u, before in zip(us[k], us[k - 1], strict=True)]
            xs.append(minus(x, minus(now, last)))
        last = now
    return xs


def weight_prediction(
    update: Updates, problem: Problem, *, strength: float, **_: Any
) -> list[Weights]:
    xs, y = [problem.start], problem.start
    for k in range(STEPS):
        u = update(problem.gradients(k, xs[max(k - 1, 0)]))
        y = minus(y, u)
        xs.append(minus(y, u, strength))
    return xs


def nesterov(update: Updates, problem: Problem, *, momentum: float, **_: Any) -> list[Weights]:
    """Equation 10 of arXiv 2505.01099."""
    ws, xs = [problem.start], []
    for t in range(STEPS + 1):
        d = [momentum * w for w in minus(ws[t], ws[max(t - 1, 0)])]
        xs.append(plus(ws[t], d))
        if t < STEPS:
            u = update(problem.gradients(t, xs[max(t - 1, 0)]))
            ws.append(minus(xs[t], u, 1.0 - momentum))
    return xs


def delay_compensation(
    update: Updates,
    problem: Problem,
    *,
    strength: float,
    adaptive_strength: bool = False,
    **_: Any,
) -> list[Weights]:
    xs = [problem.start]
    mean_squares = [torch.zeros(shape) for shape in SHAPES]
    for k in range(STEPS):
        stale = max(k - 1, 0)
        gradients = problem.gradients(k, xs[stale])
        factors: Sequence[Any] = [strength] * len(SHAPES)
        if adaptive_strength:
            keep = 0.95 if k > 0 else 0.0
            mean_squares = [
                keep * v + (1 - keep) * g * g for v, g in zip(mean_squares, gradients, strict=True)
            ]
            factors = [strength / v.sqrt() for v in mean_squares]
        compensated = [
            g + factor * g * g * (now - then)
            for g, factor, now, then in zip(gradients, factors, xs[k], xs[stale], strict=True)
        ]
        xs.append(minus(xs[k], update(compensated)))
    return xs


FORMULAS: dict[str, Callable[..., list[Weights]]] = {
    "error-feedback": error_feedback,
    "adaptive-error-feedback": adaptive_error_feedback,
    "weight-prediction": weight_prediction,
    "nesterov": nesterov,
    "delay-compensation": delay_compensation,
    "adaptive-delay-compensation": delay_compensation,
}


def plain(update: Updates, problem: Problem) -> list[Weights]:
    return weight_prediction(update, problem, strength=0.0)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "muon", "lion"])
@pytest.mark.parametrize("name", SETTINGS)
def test_follows_its_formula(name: str, optimizer: str) -> None:
    make, problem = OPTIMIZERS[optimizer], Problem()
    settings = SETTINGS[name]
    found = found_trajectory(make, problem, **settings)
    wanted = FORMULAS[name](
        Updates(make), problem, **{key: v for key, v in settings.items() if key != "name"}
    )
    uncorrected = plain(Updates(make), problem)
    for k, (these, those) in enumerate(zip(found, wanted, strict=True)):
        for x, y in zip(these, those, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5, msg=f"x_{k} is another one")
    moved = max(float((x - y).abs().max()) for x, y in zip(found[-1], uncorrected[-1], strict=True))
    # A step of an optimizer of signs is the same for gradients of the same signs.
    assert moved > (1e-3 if optimizer != "lion" else 0.0), "the correction changed nothing"


def values_of(updates: Sequence[float], **settings: Any) -> list[float]:
    optimizer = corrected(lambda p: torch.optim.SGD(p, lr=1.0), [torch.zeros(())], **settings)
    return [float(step(optimizer, [torch.tensor(float(u))])[0]) for u in updates]


def test_numbers_of_weight_prediction() -> None:
    # y is 0, -1, -11, -111.
    assert values_of((1, 10, 100), name="weight-prediction") == [-2, -21, -211]
    assert values_of((1, 10, 100), name="weight-prediction", strength=0.5) == [-1.5, -16, -161]


def test_prediction_reaches_as_far_as_the_delay() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(())) for _ in range(3)], lr=1.0)
    correction: DelayCorrection = make_correction("weight-prediction", optimizer)
    correction.delay = 3
    correction.delays[optimizer.param_groups[0]["params"][1]] = 0
    correction.enable()
    found = [[float(x) for x in step(optimizer, [torch.tensor(u)] * 3)] for u in (1.0, 10.0)]
    assert found == [[-4, -1, -4], [-41, -11, -41]]


def test_numbers_of_nesterov() -> None:
    found = values_of((1, 10, 100), name="nesterov", momentum=0.5)
    assert found == [-0.75, -8.375, -84.6875]


def test_nesterov_spreads_an_update_and_leaves_its_size() -> None:
    found = values_of((1, *[0] * 60), name="nesterov", momentum=0.5)
    assert found[0] > -1.0
    assert found[-1] == pytest.approx(-1.0, abs=1e-6)


def test_nesterov_of_plain_descent_is_torchs() -> None:
    """PyTorch's own Nesterov momentum, with the learning rate that the discount makes."""
    problem = Problem()
    found = found_trajectory(OPTIMIZERS["sgd"], problem, name="nesterov", momentum=MOMENTUM)
    parameters = [torch.nn.Parameter(value.clone()) for value in problem.start]
    theirs = torch.optim.SGD(
        parameters, lr=0.1 * (1.0 - MOMENTUM), momentum=MOMENTUM, nesterov=True
    )
    wanted = [problem.start]
    for k in range(STEPS):
        wanted.append(step(theirs, problem.gradients(k, wanted[max(k - 1, 0)])))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_numbers_of_delay_compensation() -> None:
    # 3 - 0.5 * 9 * 1 = -1.5 and 2 - 0.5 * 4 * -1.5 = 5
    found = values_of((1, 3, 2), name="delay-compensation", strength=0.5)
    assert found == [-1.0, 0.5, -4.5]


def test_numbers_of_the_adaptive_strength() -> None:
    # Halved, turned round, grown: lambda is 1/2, 0, 1.
    found = values_of((4, 2, -1, -3), name="error-feedback", adaptive_strength=True)
    assert found == [-4.0, -3.0, -1.0, 5.0]
    # Where updates neither shrink nor turn round it is plain error feedback.
    assert values_of((1, 10, 100), name="error-feedback", adaptive_strength=True) == [
        -1.0,
        -20.0,
        -210.0,
    ]


def test_agreement_of_updates() -> None:
    update = torch.tensor([1.0, -1.0, 3.0, -3.0, 0.0, 0.0, 2.0, -2.0, 1e-30])
    last = torch.tensor([2.0, 2.0, 2.0, -2.0, 1.0, 0.0, 0.0, -0.0, 1e-30])
    # The square of the last one is no number of fp32 any more.
    assert agreement(update, last).tolist() == [0.5, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_prediction_is_error_feedback_but_for_the_first_step() -> None:
    """With the same gradients: x_{k+1} + lambda U_0 from the second step on."""
    gradients = [Problem().gradients(k, Problem().start) for k in range(STEPS)]
    paths = []
    for name in ("error-feedback", "weight-prediction"):
        optimizer = corrected(OPTIMIZERS["adam"], Problem().start, name=name, strength=STRENGTH)
        paths.append([step(optimizer, gradient) for gradient in gradients])
    feedback, predicted = paths
    first = minus(Problem().start, feedback[0])
    torch.testing.assert_close(predicted[0], minus(feedback[0], first, STRENGTH))
    for these, those in zip(feedback[1:], predicted[1:], strict=True):
        torch.testing.assert_close(these, plus(those, first, STRENGTH), rtol=1e-4, atol=1e-5)


# The interface


@pytest.mark.parametrize("name", SETTINGS)
def test_weight_decay_acts_near_the_weights(name: str) -> None:
    """At another point than without the correction, by a multiple of the last updates."""
    rate, decay = 1e-3, 0.1
    problem = Problem()

    def decayed(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(p, lr=rate, weight_decay=decay)

    def undecayed(p: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(p, lr=rate)

    found = found_trajectory(decayed, problem, **SETTINGS[name])[-1]
    without = found_trajectory(undecayed, problem, **SETTINGS[name])[-1]
    # Of STEPS updates, the last few spread with nesterov, and one more ahead.
    for x, y, start in zip(found, without, problem.start, strict=True):
        shrunk = ((y - x) / start)[start.abs() > 0.2]
        assert 0.5 * STEPS * rate * decay < float(shrunk.median()) < 1.5 * STEPS * rate * decay


@pytest.mark.parametrize("name", SETTINGS)
def test_shards_are_corrected_like_the_whole(name: str) -> None:
    """To the last bit, wherever a parameter is cut."""
    problem = Problem()

    def steps(cuts: Sequence[int]) -> list[torch.Tensor]:
        def cut(values: Weights) -> Weights:
            flat = torch.cat([value.flatten() for value in values])
            return list(flat.tensor_split(list(cuts)))

        optimizer = corrected(
            lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
            cut(problem.start),
            **SETTINGS[name],
        )
        gradients = [problem.gradients(k, problem.start) for k in range(STEPS)]
        return [torch.cat(step(optimizer, cut(gradient))) for gradient in gradients]

    whole = steps([])
    for cuts in ([32], [33], [16, 48, 64]):
        assert all(torch.equal(a, b) for a, b in zip(steps(cuts), whole, strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_goes_on_from_a_state_dict(name: str) -> None:
    problem, settings, make = Problem(), SETTINGS[name], OPTIMIZERS["adam"]
    optimizer = corrected(make, problem.start, **settings)
    gradients = [problem.gradients(k, problem.start) for k in range(STEPS)]
    middle = [step(optimizer, gradient) for gradient in gradients[:5]][-1]
    saved = copy.deepcopy(optimizer.state_dict())
    resumed = make([torch.nn.Parameter(value.clone()) for value in middle])
    resumed.load_state_dict(saved)
    correction = make_correction(optimizer=resumed, **settings)
    first = correction_of(optimizer)
    assert first is not None
    correction.load_state_dict(first.state_dict())
    for gradient in gradients[5:]:
        for x, y in zip(step(resumed, gradient), step(optimizer, gradient), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", SETTINGS)
def test_starts_anew_when_it_is_enabled_again(name: str) -> None:
    problem, settings = Problem(), SETTINGS[name]
    make: Make = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    optimizer = corrected(make, problem.start, **settings)
    gradients = [problem.gradients(k, problem.start) for k in range(STEPS)]
    middle = [step(optimizer, gradient) for gradient in gradients[:5]][-1]
    correction = correction_of(optimizer)
    assert correction is not None
    correction.enable()
    assert not any(optimizer.state.values())
    fresh = corrected(make, middle, **settings)
    for gradient in gradients[5:]:
        for x, y in zip(step(optimizer, gradient), step(fresh, gradient), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("name", SETTINGS)
def test_buffers_are_those_that_are_announced(name: str) -> None:
    settings = SETTINGS[name]
    optimizer = corrected(OPTIMIZERS["adam"], Problem().start, **settings)
    step(optimizer, Problem().gradients(0, Problem().start))
    correction = correction_of(optimizer)
    assert correction is not None
    wanted = CORRECTIONS[settings["name"]].buffers_with(settings_of(**settings))
    for p, state in optimizer.state.items():
        buffers = {key for key in state if key.startswith(STATE_PREFIX)}
        assert buffers == set(correction.state_keys)
        assert len(buffers) == wanted
        for key in buffers:
            assert (state[key].shape, state[key].dtype) == (p.shape, torch.float32)
            assert not state[key].requires_grad
    assert correction.buffered


@pytest.mark.parametrize("name", SETTINGS)
def test_measures_its_size(name: str) -> None:
    problem, settings, rate = Problem(), SETTINGS[name], 0.1
    optimizer = corrected(lambda p: torch.optim.SGD(p, lr=rate), problem.start, **settings)
    correction = correction_of(optimizer)
    assert correction is not None
    correction.measure = True
    xs = [problem.start, step(optimizer, problem.gradients(0, problem.start))]
    assert correction.squares is None  # there was no update before it
    gradients = problem.gradients(1, problem.start)
    xs.append(step(optimizer, gradients))
    assert correction.squares is not None
    moved = minus(xs[1], xs[2])
    change = minus(moved, gradients, rate)
    size = [rate * g for g in gradients]
    if settings["name"] == "delay-compensation":  # its correction is one of the gradient
        change, size = [c / rate for c in change], gradients
    for found, wanted in zip(correction.squares, (change, size), strict=True):
        assert float(found) == pytest.approx(float(sum(w.square().sum() for w in wanted)), rel=1e-3)
        assert float(found) > 0.0
    correction.measure = False
    step(optimizer, gradients)
    assert correction.squares is None


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.25])
def test_error_feedback_is_as_strong_as_a_batch_is_delayed(share: float, adaptive: bool) -> None:
    """Where only a part of each batch is delayed, by its share of the full correction."""

    def path(strength: float, delay: float) -> list[Weights]:
        optimizer = corrected(
            OPTIMIZERS["adam"],
            Problem().start,
            name="error-feedback",
            strength=strength,
            adaptive_strength=adaptive,
        )
        correction = correction_of(optimizer)
        assert correction is not None
        correction.delay = delay
        return [step(optimizer, Problem().gradients(k, Problem().start)) for k in range(STEPS)]

    for these, those in zip(path(2.0, share), path(2.0 * share, 1.0), strict=True):
        torch.testing.assert_close(these, those, rtol=1e-6, atol=1e-7)


def test_what_cannot_be_made_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(
        ValueError, match="no such delay correction; there are: none, error-feedback, weight-pred"
    ):
        CORRECTIONS["magic"]
    with pytest.raises(ValueError, match=r"--delay-correction-momentum must be in \[0, 1\)"):
        make_correction("nesterov", optimizer, momentum=1.0)
    nothing: Any = object()
    for record in CORRECTIONS:
        with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
            make_correction(record.name, nothing)


@pytest.mark.parametrize("name", SETTINGS)
def test_finite_numbers_stay_finite(name: str) -> None:
    """Zero gradients and updates, as rows of an embedding have whose tokens do not occur."""
    optimizer = corrected(OPTIMIZERS["adam"], [torch.ones(4)], **SETTINGS[name])
    for k in range(6):
        gradient = torch.tensor([0.0, float(k % 2), 1e-30, -1e-8])
        (x,) = step(optimizer, [gradient])
        assert all(math.isfinite(value) for value in x.tolist())
    assert x[0] == 1.0
