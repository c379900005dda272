"""Models that people train: the same losses on several stages as on one, as in test_equality.py."""

from typing import Any

import pytest
import torch

from tests.support.shared_jobs import Results, job
from tests.training.cases import (
    CLIP,
    MUON,
    PER_TOKEN,
    Case,
    check_agreement,
    check_close,
    parameters,
)

TWO_VERSIONS: dict[str, Any] = {"pipeline_schedule": "pipedream-2bw"}
FRESH: dict[str, Any] = {"pipeline_schedule": "fresh-2bw", "delayed_microbatches": 1}
STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 2}


def _case(
    name: str,
    model: str,
    schedule: dict[str, Any],
    layout: dict[str, Any] | None = None,
    *,
    ranks: int = 2,
    slow: bool = True,
    **flags: Any,
) -> Case:
    """A layout, two stages by default, against a single stage."""
    common = {**schedule, "clip_grad": CLIP, **flags}
    return Case(
        name,
        job(ranks, model=model, **common, **(STAGES if layout is None else layout)),
        job(1, model=model, **common),
        slow=slow,
    )


CASES = [
    # Grouped queries, QK layernorm, RMSNorm, SwiGLU, rotary positions.
    _case("llama-fresh", "llama", FRESH, slow=False),
    _case("llama", "llama", TWO_VERSIONS),
    _case("llama-pp4", "llama", TWO_VERSIONS, {"pipeline_model_parallel_size": 4}, ranks=4),
    # Muon splits the query, key and value matrices, of unequal size with grouped queries.
    _case("llama-muon", "llama", FRESH, **MUON),
    _case(
        "llama-context",
        "llama",
        TWO_VERSIONS,
        {**STAGES, "context_parallel_size": 2, "use_distributed_optimizer": True},
        ranks=4,
    ),
    _case("mixture-context", "moe", TWO_VERSIONS, {**STAGES, "context_parallel_size": 2}, ranks=4),
    _case("latent-fresh", "latent", FRESH, slow=False),
    _case("latent", "latent", TWO_VERSIONS),
    _case("latent-muon", "latent", FRESH, **MUON),
    # Shared experts, groups of experts, a dense layer first, the sequences' auxiliary loss.
    # Stage 0 completes the first update before the first log line, the others behind it.
    _case("shared-experts-fresh", "shared-experts", FRESH, slow=False),
    _case("shared-experts", "shared-experts", TWO_VERSIONS),
    # Expert bias, and the auxiliary loss of tokens counted over a batch.
    _case("balanced-fresh", "balanced", FRESH, slow=False),
    _case("balanced", "balanced", TWO_VERSIONS),
    _case("balanced-pp4", "balanced", TWO_VERSIONS, {"pipeline_model_parallel_size": 4}, ranks=4),
    _case("quantile-fresh", "quantile", FRESH),
    # Layers that predict further tokens, with a copy of the embedding, on the last stage.
    _case("mtp-fresh", "mtp", FRESH, slow=False),
    _case("mtp", "mtp", TWO_VERSIONS),
    _case("mtp-pp4", "mtp", TWO_VERSIONS, {"pipeline_model_parallel_size": 4}, ranks=4),
    _case("mtp-moe", "mtp-moe", FRESH),
    _case("mtp-per-token", "mtp", TWO_VERSIONS, **PER_TOKEN),
    _case(
        "layout",
        "tied",
        FRESH,
        {**STAGES, "pipeline_model_parallel_layout": "Ettt|tL"},
        slow=False,
    ),
    _case(
        "layout-with-bare-ends",
        "untied",
        TWO_VERSIONS,
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "E|tt|tt|L"},
        ranks=4,
    ),
]


@pytest.mark.parametrize("case", parameters(CASES))
def test_stages_agree_with_one(results: Results, case: Case) -> None:
    check_agreement(results, case)


PREDICTING = [case for case in CASES if case.job.model.startswith("mtp")]


@pytest.mark.parametrize("case", parameters(PREDICTING))
def test_losses_of_further_tokens_are_logged_in_their_iteration(
    results: Results, case: Case
) -> None:
    found, wanted = (
        {
            10 * iteration + token: loss
            for iteration, losses in enumerate(results[each].further)
            for token, loss in enumerate(losses)
        }
        for each in case.jobs
    )
    assert len(wanted) == 10 * (2 if case.job.model == "mtp" else 1)
    assert len(set(wanted.values())) == len(wanted)
    check_close("losses of further tokens", found, wanted, case.rtol)


@pytest.mark.parametrize("case", parameters(each for each in CASES if each.name == "mtp-fresh"))
def test_the_copy_of_the_embedding_that_predicts_stays_equal(results: Results, case: Case) -> None:
    first, last = (results[case.job].tensors(rank)["embedding"] for rank in (0, 1))
    assert torch.equal(first, last)
    wanted = results[case.like].tensors()["embedding"]
    tolerance = 100 * case.rtol * float(wanted.abs().max())
    torch.testing.assert_close(first, wanted, rtol=0, atol=tolerance)
