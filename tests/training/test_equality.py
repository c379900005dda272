"""One run of PipeDream-2BW is like another, whatever the layout.

All jobs start from one torch_dist checkpoint, without dropout. The reference is a pipeline of one
stage, where the order of actions is trivial. Everything else has to give its losses and gradient
norms: more stages, data and tensor parallelism, the update at the end of the iteration instead of
deferred.
"""

import dataclasses
from typing import Any

import pytest
import torch

from tests.support.gpt import ASYNC
from tests.support.shared_jobs import Job, JobResult, Results, job
from tests.training.cases import (
    BF16,
    CLIP,
    MUON,
    OVERLAPPED,
    PER_TOKEN,
    RECOMPUTED,
    Case,
    check_agreement,
    check_close,
    parameters,
)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp1": (1, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    # Two layers on the first stage, one on each of the others.
    "pp3": (3, {"pipeline_model_parallel_size": 3, "decoder_first_pipeline_num_layers": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "dp2": (2, {}),
    "dp2-distopt": (2, {"use_distributed_optimizer": True}),
    "pp2-dp2": (4, {"pipeline_model_parallel_size": 2}),
    "pp2-dp2-distopt": (
        4,
        {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    ),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2-tp2-sp": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    "pp2-tp2-sp-distopt": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
        },
    ),
}
CONTEXT: dict[str, Any] = {"context_parallel_size": 2}
LAYOUTS |= {
    "cp2": (2, CONTEXT),
    "cp2-distopt": (2, {**CONTEXT, "use_distributed_optimizer": True}),
    "pp2-cp2": (4, {**CONTEXT, "pipeline_model_parallel_size": 2}),
    "pp2-cp2-distopt": (
        4,
        {**CONTEXT, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    ),
}
UNDEFERRED: dict[str, Any] = {"no_deferred_update": True}


HIDDEN = 32
"""Of all shared jobs."""


def _job(layout: str, *, model: str = "tied", **flags: Any) -> Job:
    ranks, layout_flags = LAYOUTS[layout]
    return job(ranks, model=model, **{**ASYNC, "clip_grad": CLIP, **layout_flags, **flags})


def _cases(
    name: str,
    layouts: dict[str, str],
    *,
    model: str = "tied",
    rtol: float = 1e-6,
    norm_rtol: float = 5e-6,
    slow: bool = False,
    **flags: Any,
) -> list[Case]:
    """Layouts against a single stage with the same flags, whose updates are deferred.

    Args:
        layouts: for each of ``LAYOUTS``, whether to try the deferred update ("d"), the undeferred
            ("u"), or both; a capital stands for a slow test.
    """
    like = _job("pp1", model=model, **flags)
    found = []
    for layout, kinds in layouts.items():
        for kind in kinds:
            more = UNDEFERRED if kind in "uU" else {}
            found.append(
                Case(
                    "-".join([name, layout, *(["undeferred"] if more else [])]),
                    _job(layout, model=model, **flags, **more),
                    like,
                    rtol,
                    norm_rtol,
                    slow or kind.isupper(),
                )
            )
    return found


LIKE_ADAM = _job("pp1")
UNEVEN: dict[str, Any] = {"decoder_first_pipeline_num_layers": 3}
CORRECTED: dict[str, Any] = {"delay_correction": "error-feedback"}
CORRECTIONS: dict[str, dict[str, Any]] = {
    "adaptive": {**CORRECTED, "delay_correction_adaptive_strength": True},
    "prediction": {"delay_correction": "weight-prediction"},
    "nesterov": {"delay_correction": "nesterov", "delay_correction_momentum": 0.9},
    "compensation": {
        "delay_correction": "delay-compensation",
        "delay_correction_strength": 1000.0,
        "delay_correction_adaptive_strength": True,
    },
}
QUICK = {"prediction", "compensation"}
"""One of each kind: of the weights that run, and of the gradient."""
# Four experts, two on each data-parallel rank.
EXPERTS: dict[str, Any] = {"expert_model_parallel_size": 2}
FRESH: dict[str, Any] = {"pipeline_schedule": "fresh-2bw"}
PACI: dict[str, Any] = {"pipeline_schedule": "paci"}
SECOND_BUFFER: dict[str, Any] = {**OVERLAPPED, "second_grad_buffer": True}

PRECISION_AWARE: dict[str, Any] = {
    "bf16": True,
    "use_precision_aware_optimizer": True,
    "main_params_dtype": "fp16",
    "exp_avg_dtype": "bf16",
}

CASES = [
    *_cases(
        "adam",
        {
            "pp1": "u",
            "pp2": "du",
            "pp4": "du",
            "dp2": "DU",
            "dp2-distopt": "dU",
            "pp2-dp2": "DU",
            "pp2-dp2-distopt": "du",
            "tp2": "dU",
            "tp2-sp": "DU",
            "pp2-tp2-sp": "DU",
            "pp2-tp2-sp-distopt": "DU",
        },
    ),
    *_cases(
        "untied",
        {
            "pp1": "U",
            "pp2": "Du",
            "pp4": "DU",
            "dp2": "DU",
            "dp2-distopt": "DU",
            "pp2-dp2": "DU",
            "pp2-dp2-distopt": "dU",
            "tp2": "DU",
            "tp2-sp": "DU",
            "pp2-tp2-sp": "DU",
            "pp2-tp2-sp-distopt": "DU",
        },
        model="untied",
    ),
    *_cases(
        "muon",
        {
            "pp1": "U",
            "pp2": "dU",
            "pp4": "dU",
            "dp2": "dU",
            "pp2-dp2": "DU",
            "tp2": "DU",
            "pp2-tp2-sp": "DU",
        },
        **MUON,
    ),
    *_cases(
        "muon-untied",
        {"pp1": "U", "pp2": "DU", "pp4": "DU", "pp2-dp2": "DU", "pp2-tp2-sp": "DU"},
        model="untied",
        **MUON,
    ),
    *_cases("per-token", {"pp1": "U", "pp2": "dU", "pp2-dp2-distopt": "Du"}, **PER_TOKEN),
    *_cases("per-token-tp", {"pp2-tp2-sp": "DU"}, **PER_TOKEN),
    *_cases("corrected-adam", {"pp1": "U", "pp2": "dU", "pp2-dp2-distopt": "dU"}, **CORRECTED),
    *_cases("corrected-muon", {"pp1": "U", "pp2": "DU"}, **MUON, **CORRECTED),
    *(
        case
        for name, flags in CORRECTIONS.items()
        for case in (
            *_cases(
                name,
                {
                    "pp1": "U",
                    "pp2": "dU" if name in QUICK else "DU",
                    "pp2-dp2-distopt": "D",
                    "tp2": "D",
                },
                **flags,
            ),
            *_cases(f"{name}-muon", {"pp2": "D", "pp2-dp2": "D"}, **MUON, **flags),
        )
    ),
    *_cases("adam-bf16", {"pp2": "d", "dp2-distopt": "D", "pp4": "D"}, **BF16, bf16=True),
    *_cases(
        "muon-bf16", {"pp2": "D", "pp2-dp2-distopt": "dU", "dp2": "D"}, **BF16, **MUON, bf16=True
    ),
    *(
        Case(
            "-".join(["layer-wise", model, name]),
            _job("pp2-dp2-distopt", model=model, **MUON, bf16=True, **flags),
            _job("pp2-dp2-distopt", model=model, **MUON, bf16=True, **UNDEFERRED),
            rtol=5e-5,
            norm_rtol=2e-3,
            slow=True,
        )
        for model in ("tied", "untied")
        for name, flags in (("plain", {}), ("overlapped", {"overlap_grad_reduce": True}))
    ),
    *_cases("moe", {"pp1": "U", "pp2": "DU"}, model="moe", slow=True),
    *_cases("moe-untied", {"pp1": "U", "pp2": "DU", "pp4": "DU"}, model="moe-untied", slow=True),
    *(
        Case(case.name.replace("moe", "moe-experts"), case.job, _job("pp1", model="moe"), slow=True)
        for case in _cases("moe", {"dp2": "DU", "pp2-dp2-distopt": "DU"}, model="moe", **EXPERTS)
    ),
    *_cases(
        "fresh",
        {"pp2": "dU", "tp2": "D", "pp2-tp2-sp": "D"},
        **FRESH,
        delayed_microbatches=1,
    ),
    *_cases("fresh-2", {"pp2": "D", "pp3": "d"}, **FRESH, delayed_microbatches=2),
    *_cases("fresh-3", {"pp3": "D", "pp4": "d"}, **FRESH, delayed_microbatches=3),
    *_cases(
        "fresh-corrected-muon",
        {"pp2": "D", "pp3": "D"},
        **FRESH,
        **MUON,
        **CORRECTED,
        delayed_microbatches=2,
    ),
    # What is delayed is counted on each replica: of two, twice as many microbatches of a batch.
    *(
        Case(
            f"fresh-{name}",
            _job(layout, **FRESH, **flags, micro_batch_size=1, delayed_microbatches=3),
            _job("pp1", **FRESH, **optimizer, micro_batch_size=1, delayed_microbatches=6),
            slow=name != "distopt",
        )
        for name, layout, optimizer, flags in (
            ("distopt", "pp2-dp2-distopt", {}, {}),
            ("overlapped", "pp2-dp2-distopt", {}, OVERLAPPED),
            ("second-buffer", "pp2-dp2-distopt", {}, SECOND_BUFFER),
            ("muon-dp2", "pp2-dp2", {**MUON, **CORRECTED}, {**MUON, **CORRECTED}),
        )
    ),
    Case("fresh-all", _job("pp2", **FRESH, delayed_microbatches="all"), _job("pp2"), rtol=1e-9),
    # On one stage no microbatch is in flight when an update is made.
    Case(
        "paci",
        _job("pp1", **PACI, delayed_microbatches=1),
        _job("pp1", **FRESH, delayed_microbatches=1),
        rtol=1e-9,
    ),
    # Emulated on one stage it is what real stages train: microbatches drift there.
    *(
        Case(
            f"paci-emulated-{layout}-{model}",
            _job("pp1", model=model, **PACI, delayed_microbatches=c, emulate_pipeline_stages=p),
            _job(layout, model=model, **PACI, delayed_microbatches=c),
            slow=layout != "pp2",
        )
        for layout, p, model, c in (
            ("pp2", 2, "tied", 2),
            ("pp4", 4, "tied", 3),
            ("pp4", 4, "untied", 4),
        )
    ),
    # Messages that nobody waits for: the same numbers, digit for digit.
    Case("late-messages", _job("pp2", pipeline_extra_warmup=1), _job("pp2"), rtol=1e-9),
    Case(
        "late-messages-pp4",
        _job("pp4", pipeline_extra_warmup=1),
        _job("pp4"),
        rtol=1e-9,
        slow=True,
    ),
    # Main parameters in the torch optimizer's state, of several types, and gradients beside them.
    *(
        Case(
            f"precision-aware-{name}",
            _job(name, **PRECISION_AWARE),
            _job("dp2-distopt", **PRECISION_AWARE, **UNDEFERRED),
            **BF16,
            slow=name != "pp2-dp2-distopt",
        )
        for name in ("pp2-dp2-distopt", "pp2-cp2-distopt", "dp2-distopt")
    ),
    Case(
        "precision-aware-fp32",
        _job(
            "pp2-dp2-distopt",
            **{**PRECISION_AWARE, "main_params_dtype": "fp32", "exp_avg_dtype": "fp32"},
        ),
        _job("pp2-dp2-distopt", bf16=True),
        rtol=1e-9,
        slow=True,
    ),
    *(
        Case(
            f"precision-aware-{name}",
            _job("pp2-dp2-distopt", **PRECISION_AWARE, **flags),
            _job("pp2-dp2-distopt", **PRECISION_AWARE),
            rtol=1e-9,
            slow=True,
        )
        for name, flags in (("overlapped", OVERLAPPED), ("second-buffer", SECOND_BUFFER))
    ),
    # The ranks that share a sequence reduce gradients as replicas do, and count as one of them.
    *_cases("context", {"cp2": "D", "cp2-distopt": "D", "pp2-cp2": "DU", "pp2-cp2-distopt": "dU"}),
    *_cases("context-per-token", {"pp2-cp2": "D", "pp2-cp2-distopt": "D"}, **PER_TOKEN),
    *_cases("context-corrected", {"pp2-cp2-distopt": "D"}, **CORRECTED),
    *_cases("context-muon", {"pp2-cp2": "D"}, **MUON),
    *_cases("context-fresh", {"pp2-cp2-distopt": "D"}, **FRESH, delayed_microbatches=1),
    *(
        Case(f"context-{name}", _job("pp2-cp2-distopt", **flags), LIKE_ADAM, slow=True)
        for name, flags in (("overlapped", OVERLAPPED), ("second-buffer", SECOND_BUFFER))
    ),
    *_cases("sgd", {"pp2": "D"}, optimizer="sgd", lr=0.3),
    *_cases("lion", {"pp2": "D"}, optimizer="lion", lr=3e-4),
    # Of a matrix with one gradient, most of SOAP's basis is arbitrary: a rounding difference
    # decides on it, and so on the update. Untied and unclipped, two stages have none.
    *_cases("soap", {"pp2": "D"}, model="untied", optimizer="soap", clip_grad=0, rtol=1e-9),
    # The rows of an untied embedding whose tokens do not occur have no gradient.
    *_cases(
        "zeros",
        {"pp2-dp2-distopt": "D", "pp2": "U"},
        model="untied",
        log_num_zeros_in_grad=True,
    ),
    # More microbatches than stages, and the fewest there can be: one less than stages.
    *_cases("eight-microbatches", {"pp4": "dU"}, micro_batch_size=1),
    *_cases("three-microbatches", {"pp4": "dU"}, global_batch_size=6),
    # What changes nothing.
    Case("uneven", _job("pp2", **UNEVEN), LIKE_ADAM),
    Case("recomputed", _job("pp2", **RECOMPUTED), LIKE_ADAM),
    Case("overlapped", _job("pp2-dp2-distopt", **OVERLAPPED), LIKE_ADAM),
    Case("overlapped-undeferred", _job("dp2-distopt", **{**OVERLAPPED, **UNDEFERRED}), LIKE_ADAM),
    Case(
        "overlapped-pp2-undeferred",
        _job("pp2-dp2-distopt", **{**OVERLAPPED, **UNDEFERRED}),
        LIKE_ADAM,
        slow=True,
    ),
    Case("overlapped-dp2", _job("dp2-distopt", **OVERLAPPED), LIKE_ADAM, slow=True),
    Case("second-buffer", _job("pp2-dp2-distopt", **SECOND_BUFFER), LIKE_ADAM, slow=True),
    Case("second-buffer-dp2", _job("dp2-distopt", **SECOND_BUFFER), LIKE_ADAM),
    Case("recomputed-pp4", _job("pp4", **RECOMPUTED), LIKE_ADAM, slow=True),
]

# What an update, a reduction, a gather or a message of Megatron's has a part in. What is this
# package's own logic is the same with every release.
CORE = {
    "adam-pp1-undeferred",
    "adam-pp2",
    "adam-pp2-undeferred",
    "adam-pp4",
    "adam-pp4-undeferred",
    "adam-dp2-distopt",
    "adam-pp2-dp2-distopt",
    "adam-pp2-dp2-distopt-undeferred",
    "adam-tp2",
    "untied-pp2-dp2-distopt",
    "muon-pp2",
    "muon-pp4",
    "muon-dp2",
    "per-token-pp2",
    "corrected-adam-pp2-dp2-distopt",
    "adam-bf16-pp2",
    "muon-bf16-pp2-dp2-distopt",
    "fresh-pp2",
    "fresh-2-pp3",
    "fresh-distopt",
    "precision-aware-pp2-dp2-distopt",
    "context-pp2-cp2-distopt",
    "recomputed",
    "overlapped",
    "second-buffer-dp2",
}
assert {case.name for case in CASES if not case.slow} >= CORE


@pytest.mark.parametrize("case", parameters(CASES, core=CORE))
def test_losses_and_norms_agree(results: Results, case: Case) -> None:
    check_agreement(results, case)
    found, wanted = results[case.job], results[case.like]
    assert sum(norm > CLIP for norm in wanted.norms.values()) > len(wanted.losses) / 2
    counted = bool(dict(case.job.flags).get("log_num_zeros_in_grad"))
    assert _zero_rows(found, counted=counted) == _zero_rows(wanted, counted=counted)


def _zero_rows(result: JobResult, *, counted: bool) -> dict[int, int | None]:
    """How many rows of the embedding have no gradient. A few more zeros are a matter of rounding:
    fewer than a row has."""
    assert all((zeros is not None) == counted for zeros in result.zeros.values())
    rows = {i: None if zeros is None else zeros // HIDDEN for i, zeros in result.zeros.items()}
    assert all((zeros or 0) % HIDDEN < HIDDEN // 2 for zeros in result.zeros.values()), result.zeros
    assert not counted or sum(row or 0 for row in rows.values()) > 50, result.zeros
    return rows


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name)
        for case in CASES
        if case.name in {f"{name}-pp2" for name in QUICK}
    ],
)
def test_corrections_change_what_is_trained(results: Results, case: Case) -> None:
    found, plain = results[case.like].losses, results[LIKE_ADAM].losses
    # Batches 0 and 1 run on the initial weights, and batch 2 on what the first update made.
    assert found[:2] == plain[:2]
    assert max(abs(a / b - 1) for a, b in zip(found, plain, strict=True)) > 1e-4


def _tied_copies(case: Case) -> list[tuple[int, int]]:
    """Ranks of the first and the last stage that hold the same part of the tied embedding."""
    stages = int(str(dict(case.job.flags).get("pipeline_model_parallel_size", 1)))
    if case.job.model != "tied" or stages == 1:
        return []
    of_a_stage = case.job.ranks // stages
    return [(rank, case.job.ranks - of_a_stage + rank) for rank in range(of_a_stage)]


@pytest.mark.parametrize(
    "case", parameters([case for case in CASES if _tied_copies(case)], core=CORE)
)
def test_tied_copies_stay_equal(results: Results, case: Case) -> None:
    """After ten updates, on the first and the last stage, and as on a single stage."""
    found = results[case.job]
    for first, last in _tied_copies(case):
        weight = found.tensors(first)["embedding"]
        assert torch.equal(weight, found.tensors(last)["embedding"])
        if "tensor_model_parallel_size" not in dict(case.job.flags):
            wanted = results[case.like].tensors()["embedding"]
            tolerance = 100 * case.rtol * float(wanted.abs().max())
            torch.testing.assert_close(weight, wanted, rtol=0, atol=tolerance)


@dataclasses.dataclass(frozen=True)
class Tied:
    """A job whose reference is none: rounding differences grow."""

    jobs = (_job("pp2", optimizer="soap"),)


@pytest.mark.slow
@pytest.mark.parametrize("case", [Tied()], ids=["soap-pp2"])
def test_tied_copies_stay_equal_where_rounding_is_amplified(results: Results, case: Tied) -> None:
    (found,) = (results[each] for each in case.jobs)
    first, last = (found.tensors(rank)["embedding"] for rank in (0, 1))
    assert torch.equal(first, last)
    assert len(set(found.losses)) > 5


EVALUATED: dict[str, Any] = {"eval_interval": 3, "eval_iters": 2}


@dataclasses.dataclass(frozen=True)
class EvaluatedCase:
    layout: str
    flags: tuple[tuple[str, Any], ...] = ()

    @property
    def jobs(self) -> tuple[Job, Job, Job]:
        """With evaluations, without, and a single stage with evaluations."""
        return (
            _job(self.layout, **EVALUATED, **dict(self.flags)),
            _job(self.layout, **dict(self.flags)),
            _job("pp1", **EVALUATED),
        )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(EvaluatedCase("pp2"), id="pp2", marks=pytest.mark.core),
        pytest.param(
            EvaluatedCase("pp2", (("no_deferred_update", True),)),
            id="pp2-undeferred",
            marks=pytest.mark.slow,
        ),
        pytest.param(EvaluatedCase("pp4"), id="pp4", marks=pytest.mark.slow),
        pytest.param(EvaluatedCase("pp2-dp2-distopt"), id="pp2-dp2", marks=pytest.mark.slow),
    ],
)
def test_evaluation_leaves_training_alone(results: Results, case: EvaluatedCase) -> None:
    """Microbatches in flight stay; evaluations run on the newest weights."""
    found, without, like = (results[each] for each in case.jobs)
    assert found.losses == without.losses
    assert found.norms == without.norms
    # After 3, 6 and 9 iterations, and twice at the end: on the validation and on the test set.
    assert [done for done, _ in found.validation] == [3, 6, 9, 10, 10]
    check_close(
        "validation losses",
        dict(enumerate(loss for _, loss in found.validation)),
        dict(enumerate(loss for _, loss in like.validation)),
        1e-6,
    )


START = 4
LATE: dict[str, Any] = {"async_start_iteration": START}


@dataclasses.dataclass(frozen=True)
class LateCase:
    layout: str
    flags: tuple[tuple[str, Any], ...] = ()

    @property
    def jobs(self) -> tuple[Job, Job, Job]:
        """From iteration ``START`` on, likewise on a single stage, and synchronous throughout."""
        flags = dict(self.flags)
        synchronous = {name: value for name, value in flags.items() if name in MUON}
        return (
            _job(self.layout, **LATE, **flags),
            _job("pp1", **LATE, **{n: v for n, v in flags.items() if n != "no_deferred_update"}),
            job(clip_grad=CLIP, **synchronous),
        )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(LateCase("pp2"), id="pp2", marks=pytest.mark.slow),
        pytest.param(
            LateCase("pp2", tuple(CORRECTED.items())), id="pp2-corrected", marks=pytest.mark.core
        ),
        pytest.param(LateCase("dp2-distopt"), id="dp2-distopt", marks=pytest.mark.slow),
        pytest.param(LateCase("pp4", (("no_deferred_update", True),)), id="pp4-undeferred"),
        pytest.param(LateCase("pp2-dp2", tuple(MUON.items())), id="muon", marks=pytest.mark.slow),
    ],
)
def test_asynchronous_from_some_iteration_on(results: Results, case: LateCase) -> None:
    found, like, synchronous = (results[each] for each in case.jobs)
    check_close("losses", dict(enumerate(found.losses)), dict(enumerate(like.losses)), 1e-6)
    check_close("norms", found.norms, like.norms, 5e-6)
    assert list(like.norms) == list(range(START, 10))
    # The first two asynchronous batches are both on the weights that the synchronous ones made.
    assert like.losses[: START + 1] == synchronous.losses[: START + 1]
    assert like.losses[START + 1 :] != synchronous.losses[START + 1 :]


@dataclasses.dataclass(frozen=True)
class SingleIteration:
    layout: str

    @property
    def jobs(self) -> tuple[Job, Job]:
        flags: dict[str, Any] = {"train_iters": 1, "lr_warmup_iters": 0}
        return _job(self.layout, **SECOND_BUFFER, **flags), _job(self.layout, **flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(SingleIteration(name), id=name) for name in ("dp2-distopt", "pp2-dp2-distopt")],
)
def test_the_only_batch_of_a_run_is_reduced_once(results: Results, case: SingleIteration) -> None:
    found, plain = (results[each] for each in case.jobs)
    assert list(plain.norms) == [0]
    check_close("norms", found.norms, plain.norms, 5e-6)


@pytest.mark.core
def test_training_loop_is_told_of_the_last_completed_update(results: Results) -> None:
    """What Megatron prints as an iteration's norm is the update's before; at the end its own."""
    found = results[LIKE_ADAM]
    norms = [found.norms[k] for k in range(10)]
    assert found.reported == [None, *norms[:8], norms[9]]
    undeferred = results[_job("pp2", **UNDEFERRED)]
    assert undeferred.reported == pytest.approx([undeferred.norms[k] for k in range(10)], rel=1e-6)
