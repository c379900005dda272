"""Rules on flags that Megatron's own checks end at with a bare assertion, or with none at all.

They are checked ahead of Megatron's ``validate_args``, on the arguments as they were parsed, and
say what to change. As all rules, only where a flag of this package is used.

Source: ``validate_args`` in megatron/training/arguments.py, ``get_num_layers_to_build`` in
megatron/core/transformer/transformer_block.py, ``build_train_valid_test_data_loaders`` and
``get_optimizer_param_scheduler`` in megatron/training/training.py, ``OptimizerParamScheduler`` in
megatron/core/optimizer_param_scheduler.py.
"""

import importlib.util
import itertools
from collections.abc import Callable
from typing import Any, Final

from megatron_async.config.validation.rule import Rule, Scope, Subject, rule
from megatron_async.megatron.training import step_batch_sizes

__all__ = ["RULES", "step_schedule_problem"]

_VIRTUAL: Final = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
)
_OF_INTERLEAVED: Final = (
    ("--overlap-p2p-communication-warmup-flush", "overlap_p2p_comm_warmup_flush"),
    ("--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step"),
)
"""Flags that Megatron takes with its interleaved schedule alone."""


def _counted_layers(subject: Subject) -> int | None:
    """Layers that Megatron spreads over the stages, embedding and loss if they count as such."""
    layers = subject.get("num_layers")
    if layers is None or subject.get("hybrid_layer_pattern") is not None:
        return None
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    return int(layers) + sum(bool(subject.get(name)) for name in extra)


def _even(subject: Subject) -> bool:
    return all(
        subject.get(name) is None
        for name in (
            "pipeline_model_parallel_layout",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        )
    )


def _divides(subject: Subject) -> bool:
    layers = _counted_layers(subject)
    if layers is None or not _even(subject) or subject.stages < 1:
        return True
    return layers % subject.stages == 0


def _middle(subject: Subject) -> tuple[int, int] | None:
    """(layers, stages) between what --decoder-first- and --decoder-last-pipeline-num-layers take;
    None without them."""
    layers = _counted_layers(subject)
    ends = [
        subject.get("decoder_first_pipeline_num_layers"),
        subject.get("decoder_last_pipeline_num_layers"),
    ]
    given = [int(end) for end in ends if end is not None]
    if layers is None or not given or subject.get("pipeline_model_parallel_layout") is not None:
        return None
    return layers - sum(given), subject.stages - len(given)


def _fits(subject: Subject) -> bool:
    middle = _middle(subject)
    if middle is None:
        return True
    layers, stages = middle
    return layers == 0 if stages == 0 else layers > 0 and stages > 0 and layers % stages == 0


def _misfit(subject: Subject) -> str:
    layers, stages = _middle(subject) or (0, 0)
    if layers < 0:
        return f"the first and the last stage take {-layers} layers more than there are"
    if layers == 0:
        return f"no layers are left for the {stages} stages in between"
    if stages <= 0:
        return f"{layers} layers are left, and no stages between the first and the last"
    return f"{layers} layers are left, which do not divide into the {stages} stages in between"


def _below_one(name: str) -> Callable[[Subject], bool]:
    return lambda s: s.get(name) is not None and s.get(name) < 1


def _warmup(subject: Subject) -> tuple[int, int, str] | None:
    """(warm-up, decay, their unit); None where one of them is not given."""
    if subject.get("lr_warmup_fraction") is not None:
        return None
    unit = "iters" if subject.get("train_iters") else "samples"
    warmup = subject.get(f"lr_warmup_{unit}")
    decay = subject.get(f"lr_decay_{unit}")
    decay = subject.get(f"train_{unit}") if decay is None else decay
    return None if not warmup or decay is None else (int(warmup), int(decay), unit)


def _warms_up_too_long(subject: Subject) -> bool:
    found = _warmup(subject)
    return found is not None and found[0] >= found[1]


def _long_warmup(subject: Subject) -> str:
    warmup, decay, unit = _warmup(subject) or (0, 0, "iters")
    what = "iterations" if unit == "iters" else unit
    return f"a warm-up of {warmup} {what} does not end before the schedule of {decay} does"


def step_schedule_problem(subject: Subject) -> str | None:
    """What is wrong with --step-batch-size-schedule, as Megatron's calculator asserts it."""
    schedule = subject.get("step_batch_size_schedule")
    if schedule is None:
        return None
    try:
        steps = step_batch_sizes(schedule, subject.get("seq_length"))
    except ValueError as error:
        return str(error).rstrip(".")
    thresholds = [threshold for threshold, _ in steps]
    if not steps or thresholds[0] != 0:
        return "its first threshold is not 0"
    if any(size < 1 for _, size in steps):
        return "a batch has at least one sequence"
    if any(after <= before for before, after in itertools.pairwise(thresholds)):
        return (
            "its thresholds, in sequences, do not increase: "
            f"{', '.join(map(str, thresholds))} with --seq-length {subject.get('seq_length')}"
        )
    return None


def _is_interleaved(subject: Subject) -> bool:
    layout: Any = subject.get("pipeline_model_parallel_layout")
    stages = 0 if layout is None else str(layout).count("|") + 1
    return any(subject.get(name) is not None for name in _VIRTUAL) or stages > subject.stages


def _saves_locally(subject: Subject) -> bool:
    return bool(subject.get("non_persistent_ckpt_type") == "local")


def _has_resiliency_extension() -> bool:
    return importlib.util.find_spec("nvidia_resiliency_ext") is not None


RULES: Final[tuple[Rule, ...]] = (
    rule(
        "--num-layers",
        lambda s: f"{_counted_layers(s)} layers do not divide into {s.stages} pipeline stages",
        "Change either, or give stages unequal numbers of layers with "
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers or "
        "--pipeline-model-parallel-layout.",
        when=lambda s: not _divides(s),
        name="undivided_layers",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers",
        _misfit,
        "Change them, --num-layers or --pipeline-model-parallel-size, or give a "
        "--pipeline-model-parallel-layout.",
        when=lambda s: not _fits(s),
        name="layers_left",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--eval-interval",
        lambda s: (
            f"{s.get('eval_interval')} iterations are no interval, and Megatron divides by it"
        ),
        "Leave evaluations out with --eval-iters 0, and keep an interval of 1 or more.",
        when=_below_one("eval_interval"),
        name="eval_interval",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--log-interval",
        lambda s: f"{s.get('log_interval')} iterations are no interval, and Megatron divides by it",
        "Give 1 or more; a number above --train-iters logs nothing.",
        when=_below_one("log_interval"),
        name="log_interval",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--pipeline-model-parallel-size",
        lambda s: f"there are no {s.stages} pipeline stages",
        "Give 1 or more.",
        when=lambda s: s.stages < 1,
        name="no_stages",
        scope=Scope.ALWAYS,
    ),
    *(
        rule(
            f"--{name.replace('_', '-')}",
            "a batch has at least one sequence",
            "Give 1 or more.",
            when=_below_one(name),
            name=name,
            scope=Scope.ALWAYS,
        )
        for name in ("micro_batch_size", "global_batch_size")
    ),
    rule(
        "--step-batch-size-schedule",
        lambda s: step_schedule_problem(s) or "",
        "Give THRESHOLD:BATCH_SIZE pairs: thresholds in tokens (K, M, B and T may follow), the "
        "first 0, each at least --seq-length above the one before it; batch sizes in sequences.",
        when=lambda s: step_schedule_problem(s) is not None,
        name="step_schedule",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--lr-warmup-iters, --lr-warmup-samples",
        _long_warmup,
        "Shorten it, or train for longer.",
        when=_warms_up_too_long,
        name="long_warmup",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--save",
        "Megatron wants to know how often to save",
        "Give a --save-interval of 1 or more.",
        when=lambda s: s.get("save") is not None and not s.get("save_interval"),
        name="save_interval",
        scope=Scope.ALWAYS,
    ),
    *(
        rule(
            flag,
            "it belongs to Megatron's interleaved schedule, and there are no virtual stages",
            "Drop it.",
            when=lambda s, dest=dest: bool(s.get(dest)) and not _is_interleaved(s),  # type: ignore[misc]
            name=f"{dest}_without_interleaving",
            scope=Scope.ALWAYS,
        )
        for flag, dest in _OF_INTERLEAVED
    ),
    rule(
        "--non-persistent-ckpt-type",
        "nvidia-resiliency-ext, which writes and reads local checkpoints, is not installed",
        "Install it (the extra `local` of megatron-async), or use global.",
        when=lambda s: _saves_locally(s) and not _has_resiliency_extension(),
        name="local_checkpoints_extension",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--non-persistent-ckpt-type",
        "Megatron wants to know where to put local checkpoints",
        "Give a --non-persistent-local-ckpt-dir on a disk of each node.",
        when=lambda s: _saves_locally(s) and s.get("non_persistent_local_ckpt_dir") is None,
        name="local_checkpoints_directory",
        scope=Scope.ALWAYS,
    ),
    rule(
        "--replication",
        "it copies local checkpoints, and needs --replication-jump: how many ranks lie between "
        "one and that which has its copy",
        "Give --non-persistent-ckpt-type local and a --replication-jump, such as the ranks of a "
        "node, or drop it.",
        when=lambda s: (
            bool(s.get("replication"))
            and not (_saves_locally(s) and s.get("replication_jump") is not None)
        ),
        name="local_checkpoints_replication",
        scope=Scope.ALWAYS,
    ),
)
