"""What docs/theory.md states: staleness from the version rules, and recursions on a quadratic.

The recursions are run, with the package's own correction around torch's SGD where there is one, and
compared with the roots of the polynomials of the page.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.schedules import SCHEDULES
from megatron_async.schedules.schedule import Pipeline
from tests.corrections.building import make_correction

FEW = [0.01, 0.003]
"""Values of a for which a^3 is small against a^2."""


def block_steps(name: str, stages: int, microbatches: int) -> list[int]:
    """The largest delay of a gradient in block updates, of each microbatch of a late batch."""
    rule = SCHEDULES[name].rule(Pipeline(stages=stages), microbatches)
    batch = 5 * stages
    return [
        max(
            (batch - rule.forward(batch, i, r)) * stages + s - r
            for s in range(stages)
            for r in range(stages)
        )
        for i in range(microbatches)
    ]


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_delay_in_block_updates(stages: int) -> None:
    microbatches = 2 * stages
    one_step, none = 2 * stages - 1, stages - 1
    assert block_steps("1f1b", stages, microbatches) == [none] * microbatches
    assert block_steps("pipedream-2bw", stages, microbatches) == [one_step] * microbatches
    fewest = stages - 1
    assert block_steps("fresh-2bw", stages, microbatches) == (
        [one_step] * fewest + [none] * (microbatches - fewest)
    )
    assert block_steps("pipedream", stages, microbatches) == [stages**2 - 1] * microbatches


def randomized_pipedream(
    *, stages: int, delay: int, gamma: float, steps: int, seed: int
) -> tuple[float, float]:
    """Mean squared gradient of block updates with old gradients on a quadratic, and its bound."""
    generator = np.random.default_rng(seed)
    curvature = np.linspace(0.1, 1.0, 4 * stages)
    matrix = np.diag(curvature) + 0.02 * np.ones((4 * stages, 4 * stages))
    smooth = float(np.linalg.eigvalsh(matrix)[-1])
    history = [generator.normal(size=4 * stages)]
    first = 0.5 * float(history[0] @ matrix @ history[0])
    squares, largest = [], 0.0
    for _ in range(steps):
        block = int(generator.integers(stages))
        old = history[-1 - min(delay, len(history) - 1)]
        gradient = matrix @ old
        squares.append(float(np.square(matrix @ history[-1]).sum()))
        largest = max(largest, squares[-1])
        new = history[-1].copy()
        part = slice(4 * block, 4 * block + 4)
        new[part] -= gamma * gradient[part]
        history.append(new)
    bound = (
        2 * stages * first / (gamma * steps)
        + gamma * stages * smooth * largest
        + (gamma * smooth * delay) ** 2 * largest
    )
    return float(np.mean(squares)), bound


@pytest.mark.parametrize("delay", [0, 7, 15])  # none; one step of 4 stages; PipeDream's of 4
@pytest.mark.parametrize("gamma", [0.003, 0.03, 0.1])
def test_bound_of_randomized_pipedream(delay: int, gamma: float) -> None:
    mean, bound = randomized_pipedream(stages=4, delay=delay, gamma=gamma, steps=3000, seed=1)
    assert 0.0 < mean <= bound


@pytest.mark.parametrize("delay", [3, 7, 15])
def test_the_bound_with_its_learning_rate(delay: int) -> None:
    stages, updates, gap, smooth, largest = 4, 500, 3.0, 2.0, 5.0
    steps = stages * updates
    gamma = math.sqrt(2 * gap / (smooth * largest**2 * steps))
    bound = (
        2 * stages * gap / (gamma * steps)
        + gamma * stages * smooth * largest**2
        + (gamma * smooth * delay * largest) ** 2
    )
    assert bound == pytest.approx(
        2 * largest * math.sqrt(2 * gap * smooth * stages / updates)
        + 2 * gap * smooth * delay**2 / (stages * updates)
    )


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    return u @ v


@pytest.mark.parametrize("gamma", [0.003, 0.03, 0.3])
@pytest.mark.parametrize(
    ("share", "delay", "corrected"),
    [(0.0, 0, False), (1.0, 1, False), (0.25, 1, False), (1.0, 7, False), (1.0, 1, True)],
)
def test_bound_of_steps_of_a_fixed_length(
    gamma: float, share: float, delay: int, corrected: bool
) -> None:
    """Orthogonalised gradients of |A X - B|^2 / 2: spectral norm, and the nuclear as its dual."""
    torch.manual_seed(3)
    a = torch.randn(6, 6, dtype=torch.float64) / 6
    target = torch.randn(6, 4, dtype=torch.float64)
    smooth = float((a.T @ a).trace())  # |A^T A X|* <= |A^T A|* |X|

    def gradient(at: torch.Tensor) -> torch.Tensor:
        return a.T @ (a @ at - a @ target)

    def nuclear(matrix: torch.Tensor) -> float:
        return float(torch.linalg.matrix_norm(matrix, "nuc"))

    x = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=gamma)
    if corrected:
        correction = make_correction("error-feedback", optimizer)
        correction.delay = 1.0
        correction.enable()
    first = 0.5 * float((a @ target).square().sum())
    seen, moved = [x.detach().clone()], [x.detach().clone()]
    updates: list[torch.Tensor] = []
    for k in range(400):
        old = gradient(seen[max(k - delay, 0)])
        x.grad = orthogonal(share * old + (1.0 - share) * gradient(seen[k]))
        updates.append(gamma * x.grad)
        optimizer.step()
        seen.append(x.detach().clone())
        moved.append(seen[-1] + updates[-1])
    iterates, error = seen[:-1], 2 * share * delay * gamma * smooth
    if corrected:
        for k in range(5, 400):
            assert torch.allclose(moved[k + 1], moved[k] - updates[k])
        iterates = moved[1:]
        changes = [
            float(torch.linalg.matrix_norm(new - old, 2))
            for old, new in itertools.pairwise(updates)
        ]
        # The first steps have no update before them.
        error = 2 * smooth * (float(np.mean(changes)) + 4 * gamma / 400)
        first = 0.5 * float((a @ (moved[1] - target)).square().sum())
    mean = float(np.mean([nuclear(gradient(at)) for at in iterates]))
    assert 0.0 < mean <= first / (gamma * 400) + gamma * smooth / 2 + error


def decay(
    a: float,
    *,
    share: float = 1.0,
    delay: int = 1,
    corrected: bool = False,
    steps: int = 4000,
) -> list[float]:
    """|x_k| of gradient descent on x^2 / 2 with learning rate a and a share of old gradients."""
    x = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=a)
    if corrected:
        correction = make_correction("error-feedback", optimizer)
        correction.delay = share
        correction.enable()
    seen: list[Any] = [x.detach().clone()]
    for k in range(steps):
        x.grad = share * seen[max(k - delay, 0)] + (1.0 - share) * seen[k]
        optimizer.step()
        seen.append(x.detach().clone())
    return [abs(float(value)) for value in seen]


def largest_root(polynomial: Sequence[float]) -> float:
    return float(np.abs(np.roots(polynomial)).max())


def delayed(a: float, tau: int) -> list[float]:
    return [1.0, -1.0, *[0.0] * (tau - 1), a] if tau else [1.0, a - 1.0]


def shared(a: float, q: float) -> list[float]:
    return [1.0, -(1.0 - (1.0 - q) * a), q * a]


def shared_and_corrected(a: float, q: float) -> list[float]:
    return [1.0, -(1.0 - (1.0 - q * q) * a), 2.0 * q * q * a, -q * q * a]


@pytest.mark.parametrize(
    ("polynomial", "settings"),
    [
        (delayed(0.05, 1), {}),
        (delayed(0.05, 3), {"delay": 3}),
        (shared(0.05, 0.25), {"share": 0.25}),
        (shared_and_corrected(0.05, 1.0), {"corrected": True}),
        (shared_and_corrected(0.05, 0.5), {"share": 0.5, "corrected": True}),
    ],
)
def test_the_recursion_is_that_of_the_page(polynomial: Any, settings: Any) -> None:
    # To which constant error feedback converges depends on its first step, so differences.
    path = decay(0.05, steps=300, **settings)
    late = np.abs(np.diff(path))[100:201]
    assert (late[-1] / late[0]) ** 0.01 == pytest.approx(largest_root(polynomial), rel=1e-6)


@pytest.mark.parametrize("a", FEW)
@pytest.mark.parametrize("tau", [0, 1, 2, 7])
def test_root_of_a_delay(a: float, tau: int) -> None:
    assert largest_root(delayed(a, tau)) - (1.0 - a) == pytest.approx(
        -tau * a * a, rel=0.05 * (1 + 20 * tau * tau * a), abs=a**3
    )


@pytest.mark.parametrize("a", FEW)
@pytest.mark.parametrize("q", [0.25, 0.5, 1.0])
def test_root_of_a_share_of_a_step(a: float, q: float) -> None:
    second = (largest_root(shared(a, q)) - (1.0 - a)) / a**2
    assert second == pytest.approx(-q, abs=4 * a)
    left = (largest_root(shared_and_corrected(a, q)) - (1.0 - a)) / a**2
    assert left == pytest.approx(0.0, abs=4 * a)


@pytest.mark.parametrize(
    ("polynomial", "limit"),
    [
        *[
            (lambda a, tau=tau: delayed(a, tau), 2 * math.sin(math.pi / (4 * tau + 2)))
            for tau in (0, 1, 2, 7)
        ],
        *[
            (
                lambda a, q=q: shared(a, q),
                1 / q if q >= 0.5 else min(1 / q, 2 / (1 - 2 * q)),
            )
            for q in (0.1, 0.25, 0.4, 0.5, 0.75, 1.0)
        ],
        *[
            (
                lambda a, q=q: shared_and_corrected(a, q),
                min(
                    (math.sqrt(1 + 4 / q**2) - 1) / 2,
                    2 / (1 - 4 * q * q) if q < 0.5 else math.inf,
                ),
            )
            for q in (0.1, 0.25, 0.4, 0.5, 0.75, 1.0)
        ],
    ],
)
def test_largest_learning_rate(polynomial: Callable[[float], list[float]], limit: float) -> None:
    for factor in (0.1, 0.5, 0.9, 0.999):
        assert largest_root(polynomial(factor * limit)) < 1.0
    for factor in (1.001, 1.1):
        assert largest_root(polynomial(factor * limit)) > 1.0


def test_where_the_two_limits_meet() -> None:
    for q in (0.1, 0.2, 0.25, 0.3, 0.45):
        assert (2 / (1 - 2 * q) <= 1 / q * (1 + 1e-12)) == (q <= 0.25)
        slow = (math.sqrt(1 + 4 / q**2) - 1) / 2
        assert (2 / (1 - 4 * q * q) <= slow) == (q <= 1 / math.sqrt(12))


def test_what_the_page_says_in_figures() -> None:
    assert math.sqrt(1 + 4) == pytest.approx(2.24, abs=5e-3)
    assert 1 / math.sqrt(12) == pytest.approx(0.289, abs=5e-4)
    assert (math.sqrt(5) - 1) / 2 == pytest.approx(0.618, abs=5e-4)
    assert 2 * math.sin(math.pi / 6) == pytest.approx(1.0)
