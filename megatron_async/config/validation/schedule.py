"""Rules that follow from the schedule: microbatches of two batches, and of two weight versions, are
in flight at once, also between iterations."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from megatron_async.config.validation.assertions import step_schedule_problem
from megatron_async.config.validation.rule import Rule, Subject, dest_of, rule
from megatron_async.megatron.training import step_batch_sizes

__all__ = [
    "RULES",
    "batch_sizes",
    "least_microbatches",
    "longer_delays",
    "own_notes",
    "own_problems",
]


class _Step(NamedTuple):
    """A part of --step-batch-size-schedule in which iterations are run."""

    size: int
    """Samples of a batch."""
    first: int
    """Its first iteration (0 is the run's first)."""
    end: float
    """The iteration behind its last one."""
    samples: int
    """Samples that were consumed before it."""


def batch_sizes(subject: Subject) -> list[int]:
    """Global batch sizes of the asynchronous iterations, in samples, in order.

    Of a run that goes on from a checkpoint, those that are certain to come.
    """
    if subject.get("step_batch_size_schedule") is None:
        return [int(subject.get("global_batch_size"))]
    start = subject.config.start_iteration
    steps = [step for step in _steps(subject) if step.end > start]
    if _resumes(subject):
        # Steps that a resumed run has behind it may have run on fewer stages. The last one has no
        # end, so there is always one.
        run = _steps_run(subject)
        steps = [step for step in steps if step in run][-1:] or steps[-1:]
    return [step.size for step in steps]


def _resumes(subject: Subject) -> bool:
    """Whether the run may go on from a checkpoint: --load may name a folder that is still empty.

    Source: ``checkpoint_exists`` in megatron/training/checkpointing.py.
    """
    folder = subject.get("load")
    if not folder or "://" in folder:  # of an object store nothing is known here
        return bool(folder)
    return (Path(folder) / "latest_checkpointed_iteration.txt").is_file()


def _steps(subject: Subject) -> list[_Step]:
    """The steps of --step-batch-size-schedule, without those that are over before they begin.

    Source: ``StepBatchsizeNumMicroBatchesCalculator`` in
    megatron/core/num_microbatches_calculator.py, where a size holds while the samples consumed so
    far are below the next threshold.
    """
    schedule = subject.get("step_batch_size_schedule")
    if schedule is None or step_schedule_problem(subject) is not None:
        return []
    parsed = step_batch_sizes(schedule, subject.get("seq_length"))
    steps: list[_Step] = []
    consumed = iteration = 0
    for (_, size), (end, _) in zip(parsed, [*parsed[1:], (None, 0)], strict=True):
        iterations = math.inf if end is None else max(0, math.ceil((end - consumed) / size))
        if iterations:
            steps.append(_Step(size, iteration, iteration + iterations, consumed))
        if end is not None:
            consumed += int(iterations) * size
            iteration += int(iterations)
    return steps


def _steps_run(subject: Subject) -> list[_Step]:
    """Those that begin before the run ends."""
    iterations = subject.get("train_iters") or math.inf
    samples = subject.get("train_samples") or math.inf
    return [step for step in _steps(subject) if step.first < iterations and step.samples < samples]


def _shrinking(subject: Subject) -> tuple[_Step, _Step] | None:
    return next(
        ((a, b) for a, b in itertools.pairwise(_steps_run(subject)) if b.size < a.size), None
    )


def _shrinks(subject: Subject) -> str:
    pair = _shrinking(subject)
    assert pair is not None
    before, after = pair
    return (
        f"the batch shrinks from {before.size} to {after.size} samples at iteration "
        f"{after.first + 1}, and Megatron stops where the number of microbatches decreases"
    )


def _uneven(subject: Subject) -> _Step | None:
    """The first step whose batch cannot be cut into microbatches."""
    steps = _steps_run(subject)
    if _resumes(subject):
        # Steps that a resumed run has behind it may have run on fewer ranks.
        steps = steps[-1:]
    samples = int(subject.get("micro_batch_size")) * subject.replicas
    return next((step for step in steps if step.size % samples), None)


def _is_uneven(subject: Subject) -> str:
    step = _uneven(subject)
    assert step is not None
    samples = int(subject.get("micro_batch_size")) * subject.replicas
    return (
        f"a batch of {step.size} samples, from iteration {step.first + 1} on, is no multiple of "
        f"micro batch * data parallel size = {samples}, and Megatron stops there"
    )


def least_microbatches(subject: Subject) -> int:
    """The least number of microbatches of an asynchronous iteration."""
    samples = int(subject.get("micro_batch_size")) * subject.replicas
    return min(size // samples for size in batch_sizes(subject))


def _most_microbatches(subject: Subject) -> int:
    samples = int(subject.get("micro_batch_size")) * subject.replicas
    return max(size // samples for size in batch_sizes(subject))


def longer_delays(subject: Subject) -> bool:
    """Whether delays exceed one step, or differ between stages."""
    if subject.config.schedule_record is None:
        return False
    delays = subject.delays(max(least_microbatches(subject), 1))
    return bool(delays) and (max(delays) > 1 or min(delays) != max(delays))


def _least(subject: Subject) -> int:
    record = subject.config.schedule_record
    return 1 if record is None else record.least_microbatches(subject.pipeline)


def _too_few(subject: Subject) -> str:
    p, m = subject.emulated or subject.stages, least_microbatches(subject)
    least = _least(subject)
    samples = int(subject.get("micro_batch_size")) * subject.replicas
    extra = subject.config.extra_warmup
    more = f" with --pipeline-extra-warmup {extra}" if extra else ""
    return (
        f"a batch has {m} microbatches, and {p} stages need at least {least}{more}: the first "
        f"stage runs {least} microbatches ahead of the last and must not run past the next batch "
        f"(microbatches = global batch / (micro batch * data parallel size); {least} are "
        f"{least * samples} samples)"
    )


def _short(flag: str) -> Callable[[Subject], bool]:
    """Whether the batch size comes from ``flag``, and a batch has too few microbatches."""
    return lambda s: (
        (flag == "--step-batch-size-schedule") == (s.get("step_batch_size_schedule") is not None)
        and least_microbatches(s) < _least(s)
    )


def own_problems(subject: Subject) -> list[str]:
    """What the schedule itself has against its flags, a message each."""
    record = subject.config.schedule_record
    if record is None or subject.stages < 1 or least_microbatches(subject) < _least(subject):
        return []
    problems = record.problems(subject.pipeline, least_microbatches(subject))
    return [problem.message for problem in problems]


def own_notes(subject: Subject) -> list[str]:
    """What the schedule has to say of its choices, a sentence each."""
    record = subject.config.schedule_record
    if record is None:
        return []
    least, most = least_microbatches(subject), _most_microbatches(subject)
    notes = [f"{record.name}: {note}." for note in record.notes(subject.pipeline, least)]
    if most > least:
        notes += [
            f"{record.name}, in the largest batches: {note}."
            for note in record.notes(subject.pipeline, most)
        ]
    return notes


def _equal_batches(subject: Subject) -> bool:
    record = subject.config.schedule_record
    return record is not None and record.equal_batches and subject.stages > 1


def _no_interleaving(subject: Subject) -> str:
    """Times are in slots, a forward and a backward of one microbatch through a stage."""
    p, v = subject.stages, int(subject.get("virtual_pipeline_model_parallel_size"))
    m = least_microbatches(subject)
    plain, interleaved = m + p - 1, m + (p - 1) / v
    delays = subject.delays(m)
    return (
        "the schedule has one model chunk per stage, and interleaving has no bubble left to "
        f"shrink: of {m} microbatches and {p} stages, 1F1B makes iterations of {plain} slots (a "
        f"bubble of {1 - m / plain:.1%}), {v} chunks a stage {interleaved:.4g} "
        f"({1 - m / interleaved:.1%}), and this schedule {m} (0%), for gradients that are "
        f"{sum(delays) / len(delays):.3g} updates late in the mean"
    )


def _interleaved(dest: str) -> Callable[[Subject], bool]:
    return lambda s: (
        s.get("virtual_pipeline_model_parallel_size") is not None and s.get(dest) is not None
    )


_PIPELINE = (
    *(
        rule(
            flag,
            _too_few,
            "Raise the batch size, lower --micro-batch-size, or use fewer stages.",
            when=_short(flag),
        )
        for flag in ("--global-batch-size", "--step-batch-size-schedule")
    ),
    rule(
        "--step-batch-size-schedule",
        lambda s: (
            f"{s.config.schedule} runs one batch forward while it runs another backward, "
            "microbatch by microbatch, so all need the same number of them"
        ),
        "Use one batch size, or one pipeline stage.",
        when=lambda s: _equal_batches(s) and s.get("step_batch_size_schedule") is not None,
        name="unequal_batches",
    ),
    rule(
        "--step-batch-size-schedule",
        _shrinks,
        "Let the batch grow, or keep its size.",
        when=lambda s: _shrinking(s) is not None,
        name="shrinking_batch",
    ),
    rule(
        "--step-batch-size-schedule",
        _is_uneven,
        "Choose sizes that are multiples, or lower --micro-batch-size.",
        when=lambda s: _uneven(s) is not None,
        name="uneven_batch",
    ),
    *(
        rule(
            flag,
            _no_interleaving,
            "Drop it, and give each stage one chunk of layers.",
            when=_interleaved(dest_of(flag)),
        )
        for flag in (
            "--num-layers-per-virtual-pipeline-stage",
            "--num-virtual-stages-per-pipeline-rank",
            "--pipeline-model-parallel-layout",
        )
    ),
    rule(
        "--overlap-moe-expert-parallel-comm",
        "it runs the forward and backward of two microbatches in an order of its own",
    ),
    rule(
        "--delay-wgrad-compute",
        "weight gradients would be added after the batch's gradient has been taken",
    ),
    rule(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "weight gradients would be added after the batch's gradient has been taken",
    ),
    rule(
        "--defer-embedding-wgrad-compute",
        "it computes weight gradients in the pipeline flush, and there is no flush",
    ),
    rule(
        "--fine-grained-activation-offloading",
        "its offload and reload order is that of Megatron's schedules, reset in every iteration "
        "while microbatches are in flight",
        "Drop it; --recompute-granularity saves memory too.",
    ),
    rule(
        "--cpu-offloading-num-layers",
        "its offload order assumes that a microbatch's backward follows its own forward",
        "Drop it; --recompute-granularity saves memory too.",
    ),
    rule(
        "--use-ring-exchange-p2p",
        "it needs a torch build of its own and waits for every transfer",
    ),
    rule(
        "--hybrid-context-parallel",
        "it runs a schedule of its own with a number of microbatches that changes every iteration",
    ),
    rule(
        "--micro-batch-size",
        "Megatron makes one packed sequence of a microbatch, and stages exchange tensors of the "
        "shape (--seq-length, --micro-batch-size)",
        "Use --micro-batch-size 1.",
        when=lambda s: (
            s.stages > 1
            and int(s.get("micro_batch_size") or 1) > 1
            and bool(s.get("sft") or s.get("dataloader_inter_document_masking"))
        ),
        name="packed_microbatches",
    ),
    rule(
        "variable_seq_lengths (model configuration)",
        "stages then exchange shapes with a device-wide wait before each transfer",
        "Pad the microbatches to --seq-length.",
        dest="variable_seq_lengths",
    ),
    rule(
        "num_microbatches_with_partial_activation_checkpoints (model configuration)",
        "its window of microbatches is that of Megatron's warm-up, which happens only once here",
        "Leave it None and use --recompute-granularity.",
        dest="num_microbatches_with_partial_activation_checkpoints",
    ),
    rule(
        "modelopt_enabled",
        "distillation sends the teacher's activations along with the student's, which the schedule "
        "does not do",
        "Distill with the default schedule.",
    ),
)

_WEIGHTS = (
    rule(
        "--fp16",
        "whether an update overflows, and with it the next loss scale, is known only while the "
        "next batch is running",
        "Use --bf16.",
    ),
    rule(
        "--use-megatron-fsdp",
        "sharded parameters are gathered layer by layer, so there is no second version to keep",
        "Use --use-distributed-optimizer.",
    ),
    rule(
        "--use-torch-fsdp2",
        "sharded parameters are gathered layer by layer, so there is no second version to keep",
        "Use --use-distributed-optimizer.",
    ),
    rule(
        "--tensor-parallel-num-weight-shards",
        "weights sharded beyond tensor parallelism are gathered one by one ahead of their use, so "
        "there is no second version to keep",
        "Drop it, or set it to --tensor-model-parallel-size.",
        when=lambda s: (
            (s.get("tensor_parallel_num_weight_shards") or 0)
            > s.get("tensor_model_parallel_size", 1)
        ),
    ),
    rule(
        "--expert-tensor-parallel-num-weight-shards",
        "weights sharded beyond tensor parallelism are gathered one by one ahead of their use, so "
        "there is no second version to keep",
        "Drop it, or set it to --expert-tensor-parallel-size.",
        when=lambda s: (
            (s.get("expert_tensor_parallel_num_weight_shards") or 0)
            > (s.get("expert_tensor_parallel_size") or s.get("tensor_model_parallel_size", 1))
        ),
    ),
    rule(
        "--cuda-graph-impl",
        "a captured graph reads the weights of the version that it was captured on",
        "Use --cuda-graph-impl none.",
        when=lambda s: s.get("cuda_graph_impl", "none") != "none",
    ),
    rule(
        "--optimizer-cuda-graph",
        "a captured step writes to the weights of the version that it was captured on",
    ),
    rule(
        "--use-nccl-ub",
        "the second version of the weights is not in memory that NCCL knows",
        dest="nccl_ub",
    ),
    # megatron/training/models/dist_utils.py builds GPT models without the parameter layout that
    # --no-use-layer-wise-param-layout speaks of, whatever that flag says.
    rule(
        "--overlap-param-gather",
        "with the layer-wise optimizer (an optimizer other than sgd and adam, distributed) "
        "Megatron receives the parameters in the gradient buffer, where the next batch's "
        "gradients are",
        "Drop it; --overlap-grad-reduce works.",
        when=lambda s: bool(
            s.get("overlap_param_gather") and s.get("use_layer_wise_distributed_optimizer")
        ),
    ),
    rule(
        "--second-grad-buffer",
        lambda s: (
            f"the update is launched after the next batch's first backward, which leaves time for "
            f"it with at least {s.stages + s.config.extra_warmup} microbatches, and a batch has "
            f"{least_microbatches(s)}"
        ),
        "Raise --global-batch-size, or drop it.",
        when=lambda s: (
            s.config.second_grad_buffer and least_microbatches(s) < s.stages + s.config.extra_warmup
        ),
        name="second_grad_buffer_microbatches",
    ),
    rule(
        "--second-grad-buffer",
        "the reduction has to start in the last backward to run under the next batch",
        "Add --overlap-grad-reduce, or drop it.",
        when=lambda s: s.config.second_grad_buffer and not s.get("overlap_grad_reduce"),
        name="second_grad_buffer_overlap",
    ),
    rule(
        "--overlap-param-gather-with-optimizer-step",
        "the step writes the version that no microbatch runs on, so nothing is gained, and "
        "Megatron's own code for it needs virtual stages",
    ),
    *(
        rule(
            flag,
            "experts' parameters in one grouped tensor have storage of their own, of which no "
            "second version is kept",
        )
        for flag in ("--moe-single-grouped-weight", "--moe-single-grouped-bias")
    ),
    rule(
        "--moe-paged-stash",
        "its store of activations is reset in every iteration while microbatches are in flight",
    ),
    rule(
        "--moe-expert-rank-capacity-factor",
        "on an overflow it runs an iteration again, which a schedule with microbatches in flight "
        "cannot",
        "Use --moe-expert-capacity-factor.",
        when=lambda s: s.get("moe_expert_rank_capacity_factor") is not None,
    ),
    rule(
        "--moe-enable-routing-replay",
        "it replays routing in the order in which an iteration recorded it",
    ),
)

RULES: Final[tuple[Rule, ...]] = (*_PIPELINE, *_WEIGHTS)
