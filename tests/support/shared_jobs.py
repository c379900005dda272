"""Jobs that tests share: each is run once, many of them in one launch.

A test names the jobs it needs in a parameter that has an attribute ``jobs``, and takes the fixture
``results``::

    @pytest.mark.parametrize("case", [Case(...)])
    def test_something(results, case):
        for job in case.jobs:
            assert results[job].losses

The first look-up of a job runs all jobs of as many ranks that the selected tests need. All jobs of
one model start from one checkpoint.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forked import ForkedJob, Record, run_forked
from tests.support.gpt import Value, gpt_args

__all__ = ["MODELS", "Job", "JobResult", "Results", "job", "job_argv", "results_of"]

# Learning rate and weight decay change in every iteration: a value of the wrong batch shows.
_FLAGS: Mapping[str, Value] = {
    "hidden_size": 32,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "vocab_size": 128,
    "make_vocab_size_divisible_by": 64,  # 128 rows with two tensor-parallel ranks too
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "hidden_dropout": 0,
    "attention_dropout": 0,
    "lr": "3e-3",
    "min_lr": "1e-4",
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 3,
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.1,
    "weight_decay_incr_style": "linear",
    "distributed_timeout_minutes": 2,
}

_MOE: Mapping[str, Value] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
    "disable_bias_linear": True,
}

_MTP: Mapping[str, Value] = {
    "mtp_num_layers": 1,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}

_HYBRID: Mapping[str, Value] = {**_MOE, "hybrid_layer_pattern": "*-*E"}

MODELS: Mapping[str, Mapping[str, Value]] = {
    "tied": {},
    "untied": {"untie_embeddings_and_output_weights": True},
    "moe": _MOE,
    "moe-untied": {**_MOE, "untie_embeddings_and_output_weights": True},
    "llama": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "latent": {
        "multi_latent_attention": True,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
    },
    "shared-experts": {
        **_MOE,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_z_loss_coeff": 1e-3,
        "moe_shared_expert_intermediate_size": 32,
        # A dense layer first, as many mixtures have it.
        "moe_layer_freq": "[0]+[1]*3",
        "moe_ffn_hidden_size": 32,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk": 1,
    },
    # Biases and counts of a batch: what an update and a batch change beside weights and gradients.
    "balanced": {
        **_MOE,
        "moe_router_load_balancing_type": "global_aux_loss",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.02,
    },
    "quantile": {
        **_MOE,
        "moe_router_load_balancing_type": "quantile_balancing",
        "moe_aux_loss_coeff": 0,
    },
    "mtp": {**_MTP, "mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5},
    "mtp-moe": {**_MTP, **_MOE},
    "hybrid": _HYBRID,
}
"""Models that a job can train, each with a checkpoint of its own."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job; make one with :func:`job`."""

    ranks: int
    model: str
    flags: tuple[tuple[str, Value], ...]
    prelude: str
    dump: tuple[str, ...]


def job(
    ranks: int = 1,
    *,
    model: str = "tied",
    prelude: str = "",
    dump: tuple[str, ...] = ("embedding",),
    **flags: Value,
) -> Job:
    """Make a job.

    Args:
        ranks: number of ranks.
        model: a key of ``MODELS``; the job starts from that model's checkpoint.
        prelude: code to run before the training script, once the hooks are in place.
        dump: see :class:`~tests.support.recorder.Recorder`.
        flags: added to those of all jobs, see :func:`~tests.support.gpt.gpt_args`.
    """
    return Job(ranks, model, tuple(sorted(flags.items())), prelude, dump)


def job_argv(each: Job, **more: Value) -> list[str]:
    """Make the training script's command line for a job, but for where it starts."""
    return gpt_args(**{**_FLAGS, **MODELS[each.model], **dict(each.flags), **more})


@dataclasses.dataclass(frozen=True)
class JobResult:
    """What a finished job recorded. All numbers have all their digits.

    Attributes:
        job: the job.
        directory: where it wrote.
        losses: of each iteration, from the last stage.
        reported: gradient norms that the training loop was told, None before the first.
        norms: gradient norms of asynchronous updates, by iteration (0 is the first).
        zeros: numbers of zeros in the gradients of asynchronous updates, if counted.
        validation: (number of iterations done, loss) of each evaluation.
        further: losses of multi-token prediction that each iteration logged.
    """

    job: Job
    directory: Path
    losses: list[float]
    reported: list[float | None]
    norms: dict[int, float]
    zeros: dict[int, int | None]
    validation: list[tuple[int, float]]
    further: list[list[float]]

    def tensors(self, rank: int = 0) -> dict[str, Any]:
        """What the job dumped on a rank."""
        found: dict[str, Any] = torch.load(self.directory / f"rank{rank}.pt")
        return found


class Results:
    """The results of jobs, which are run when the first of them is looked up."""

    def __init__(self, wanted: Iterable[Job]) -> None:
        self._wanted = set(wanted)
        self._found: dict[Job, JobResult | str] = {}
        self._directory = tempfile.TemporaryDirectory(prefix="megatron-async-jobs-")
        self._checkpoints: set[str] = set()

    def __getitem__(self, wanted: Job) -> JobResult:
        if wanted not in self._found:
            self._wanted.add(wanted)
            self._run(wanted.ranks)
        found = self._found[wanted]
        if isinstance(found, str):
            pytest.fail(f"{wanted} failed:\n{found}", pytrace=False)
        return found

    def close(self) -> None:
        """Delete the jobs' directories."""
        self._directory.cleanup()

    def _place(self, name: str) -> Path:
        return Path(self._directory.name) / name

    def _run(self, ranks: int) -> None:
        jobs = [j for j in self._wanted if j.ranks == ranks and j not in self._found]
        missing = {j.model for j in jobs} - self._checkpoints
        savers = [self._saver(model) for model in sorted(missing)]
        if ranks != 1 and savers:
            run_forked(1, savers)
            savers = []
        # Sets have no order that is the same in each run.
        jobs.sort(key=repr)
        first = len(self._found)
        forked = [self._forked(each, f"job-{first + i}") for i, each in enumerate(jobs)]
        records = run_forked(ranks, [*savers, *forked])
        self._checkpoints |= missing
        for each, record in zip(jobs, records[len(savers) :], strict=True):
            self._found[each] = _read(each, record)

    def _saver(self, model: str) -> ForkedJob:
        flags: dict[str, Value] = {
            **_FLAGS,
            **MODELS[model],
            "train_iters": 1,
            "lr_warmup_iters": 0,
            "optimizer": "sgd",
            "save": self._place(f"{model}-checkpoint"),
            "save_interval": 1,
            "ckpt_format": "torch_dist",
        }
        return ForkedJob(directory=self._place(f"{model}-saver"), argv=gpt_args(**flags))

    def _forked(self, each: Job, name: str) -> ForkedJob:
        start: dict[str, Value] = {
            "load": self._place(f"{each.model}-checkpoint"),
            "finetune": True,
            "no_load_optim": True,
            "no_load_rng": True,
            "ckpt_format": "torch_dist",
        }
        return ForkedJob(
            directory=self._place(name),
            argv=job_argv(each, **start),
            prelude=each.prelude,
            dump=each.dump,
        )


def _read(each: Job, record: Record) -> JobResult | str:
    last = record.numbers[-1]
    if record.failed or last is None:
        return record.describe()
    return JobResult(
        job=each,
        directory=record.directory,
        losses=last["losses"],
        reported=last["reported"],
        norms=dict(last["norms"]),
        zeros=dict(last["zeros"]),
        validation=[(done, loss) for done, loss in last["validation"]],
        further=last["further"],
    )


def results_of(session: pytest.Session) -> Results:
    """The results of the jobs of all selected tests."""
    wanted: dict[Job, None] = {}
    for item in session.items:
        for value in getattr(getattr(item, "callspec", None), "params", {}).values():
            wanted |= dict.fromkeys(getattr(value, "jobs", ()))
    return Results(wanted)
