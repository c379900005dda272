"""Where microbatches come from, and what they hold: the user's iterators, packed sequences."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.gpt import ASYNC
from tests.support.steps import Outcome, Step, run_steps

STAGES_2: Mapping[str, Any] = {"pipeline_model_parallel_size": 2, "ckpt_format": "torch"}
FRESH: Mapping[str, Any] = {**STAGES_2, "pipeline_schedule": "fresh-2bw"}
EVALUATED: Mapping[str, Any] = {"eval_interval": 3, "eval_iters": 1}
EXTERNAL: Mapping[str, Any] = {**FRESH, **EVALUATED, "dataloader_type": "external"}
PACKED: Mapping[str, Any] = {
    **STAGES_2,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "dataloader_inter_document_masking": True,
}
# A stage has no forward left in the last iteration.
FEWEST: Mapping[str, Any] = {**PACKED, "global_batch_size": 1}

# Iterators that give what Megatron's own data loader would, from the sample on that they are told.
ITERATORS = """
from torch.utils.data import default_collate
from megatron.training import get_args
from megatron_async.scripts import pretrain_gpt as script
build = script.build_datasets
def microbatches(dataset, first):
    size = get_args().micro_batch_size
    while True:
        yield default_collate([dataset[i] for i in range(first, first + size)])
        first += size
def iterators(num_samples, vp_stage=None):
    args = get_args()
    train, valid, test = build(num_samples, vp_stage)
    first = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    return tuple(map(microbatches, (train, valid, test), first))
iterators.is_distributed = True
script.build_datasets = iterators
"""

# Each microbatch says that it holds three sequences, and what Megatron counts by is shown.
LENGTHS = (8, 12, 12)
SEQUENCES = f"""
import itertools
import torch
from megatron.training import training
from megatron_async.scripts import pretrain_gpt as script
script.NOT_HERE = ()
read = script.read_microbatch
def packed(*args, **kwargs):
    ends = [0, *itertools.accumulate({LENGTHS})]
    training.update_seqlen_stats_from_cu_seqlens(torch.tensor(ends, dtype=torch.int32))
    return read(*args, **kwargs)
script.read_microbatch = packed
consume = training.consume_seqlen_stats_in_iteration
def shown():
    sums = consume()
    print("packed:", torch.distributed.get_rank(), *sums, flush=True)
    return sums
training.consume_seqlen_stats_in_iteration = shown
"""


SAVED: Mapping[str, Any] = {"save": "{dir}/external", "save_interval": 4}
LOADED: Mapping[str, Any] = {"load": "{dir}/external", "ckpt_step": 4}
STEPS = (
    Step("single", {**FRESH, **EVALUATED}),
    Step("external", {**EXTERNAL, **SAVED}, ITERATORS),
    Step("external resumed", {**EXTERNAL, **LOADED}, ITERATORS),
    Step("packed synchronous", PACKED, SEQUENCES),
    Step("packed", {**PACKED, **ASYNC}, SEQUENCES),
    Step("packed fewest", {**FEWEST, **ASYNC}, SEQUENCES),
    Step("packed undeferred", {**FEWEST, **ASYNC, "no_deferred_update": True}, SEQUENCES),
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run_steps(2, STEPS, tmp_path_factory.mktemp("data"))


def test_iterators_of_the_user_train_as_megatrons_loader(outcomes: dict[str, Outcome]) -> None:
    found, wanted = outcomes["external"], outcomes["single"]
    assert len(wanted.losses) == 7
    assert found.losses == wanted.losses
    assert found.validation == wanted.validation


def test_iterators_that_start_behind_the_consumed_samples_resume_exactly(
    outcomes: dict[str, Outcome],
) -> None:
    resumed = outcomes["external resumed"]
    assert resumed.first == 5
    assert resumed.losses == outcomes["external"].losses[4:]


def sums(outcome: Outcome) -> dict[int, list[tuple[float, float]]]:
    """Rank -> of each iteration, the number of tokens and the sum of the squared lengths."""
    found: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for rank, tokens, squares in re.findall(r"packed: (\d) (\S+) (\S+)", outcome.log):
        found[int(rank)].append((float(tokens), float(squares)))
    return found


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [("packed", 4), ("packed fewest", 1), ("packed undeferred", 1)],
)
def test_each_packed_sequence_is_counted_once(
    outcomes: dict[str, Outcome], name: str, microbatches: int
) -> None:
    """Whichever stage has run it, and whether its update is complete or not."""
    one = (sum(LENGTHS), sum(length**2 for length in LENGTHS))
    for rank, found in sums(outcomes[name]).items():
        assert len(found) == 7, rank
        total = tuple(map(sum, zip(*found, strict=True)))
        assert total == (7 * microbatches * one[0], 7 * microbatches * one[1]), rank
    assert sums(outcomes["packed synchronous"])[0] == [(4 * one[0], 4 * one[1])] * 7
