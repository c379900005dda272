"""Jobs that have to agree with others, and the flags that they share."""

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from tests.support.shared_jobs import Job, Results

__all__ = [
    "BF16",
    "CLIP",
    "DISTRIBUTED",
    "MUON",
    "OVERLAPPED",
    "PER_TOKEN",
    "RECOMPUTED",
    "Case",
    "check_agreement",
    "check_close",
    "parameters",
]

CLIP = 0.5
"""Below the gradient norms of all but a few iterations."""
MUON: Mapping[str, Any] = {
    "optimizer": "muon",
    "muon_tp_mode": "duplicated",
    # Its default lets a CPU multiply in bf16.
    "muon_fp32_matmul_prec": "high",
}
DISTRIBUTED: Mapping[str, Any] = {"use_distributed_optimizer": True}
OVERLAPPED: Mapping[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTED: Mapping[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
PER_TOKEN: Mapping[str, Any] = {"calculate_per_token_loss": True, "eod_mask_loss": True}
BF16: Mapping[str, Any] = {"rtol": 2e-4, "norm_rtol": 1e-2}
"""Tolerances of a case in bf16."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A job and the one that it has to agree with.

    Attributes:
        name: the test's.
        job: the job.
        like: the reference.
        rtol: largest relative difference of losses.
        norm_rtol: largest relative difference of gradient norms.
        slow: whether the test is left out of CI.
    """

    name: str
    job: Job
    like: Job
    rtol: float = 1e-6
    norm_rtol: float = 5e-6
    slow: bool = False

    @property
    def jobs(self) -> tuple[Job, Job]:
        """As the fixture ``results`` asks for them."""
        return self.job, self.like


def parameters(cases: Iterable[Case], *, core: Collection[str] = ()) -> list[ParameterSet]:
    """Return the cases as parameters of a test.

    Args:
        cases: the cases.
        core: names of those that every release of Megatron has to pass.
    """
    return [
        pytest.param(
            case,
            id=case.name,
            marks=[
                *([pytest.mark.slow] if case.slow else []),
                *([pytest.mark.core] if case.name in core else []),
            ],
        )
        for case in cases
    ]


def check_close(name: str, found: dict[int, float], wanted: dict[int, float], rtol: float) -> None:
    """Compare numbers of each iteration."""
    assert found.keys() == wanted.keys()
    assert all(math.isfinite(value) for value in (*found.values(), *wanted.values()))
    worst = max(abs(found[i] - wanted[i]) / abs(wanted[i]) for i in wanted)
    assert worst <= rtol, f"{name} differ by {worst:.1e}: {found} and {wanted}"
    print(f"{name} differ by at most {worst:.1e}")


def check_agreement(results: Results, case: Case) -> None:
    """Compare losses and gradient norms of a case's two jobs."""
    found, wanted = results[case.job], results[case.like]
    losses = wanted.losses
    assert len(found.losses) == len(losses) == 10
    check_close("losses", dict(enumerate(found.losses)), dict(enumerate(losses)), case.rtol)
    # Training changes the losses by far more than what is compared.
    assert max(losses) - min(losses) > 100 * case.rtol * max(losses)
    check_close("norms", found.norms, wanted.norms, case.norm_rtol)
