"""Pretrain a GPT model with Megatron and its flags, from the wheel alone.

    torchrun --nproc-per-node N -m megatron_async examples/pretrain_gpt.py FLAGS

The wheel of megatron-core holds ``megatron.training`` but not the script that starts it. This one
takes the same flags for GPT models and gives the same losses, to the last digit. With
``--hybrid-layer-pattern`` it trains a hybrid model, as pretrain_hybrid.py does. What it leaves to
the script of Megatron-LM (:data:`NOT_HERE`) ends in an error that says so.
"""

import json
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
)
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_async.megatron.gpt import batch_on_this_tp_rank, pretrain

__all__ = ["NOT_HERE", "forward_step", "main"]

NOT_HERE = (
    "sft",
    "fim_data",
    "logits_load_dir",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "overlap_moe_expert_parallel_comm",
    "inprocess_restart",
)
"""Arguments that need more than this script does."""

_FIELDS = (
    "tokens",
    "labels",
    "loss_mask",
    "position_ids",
    "attention_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)
"""Every field that Megatron's batch helpers look up; the last five stay None without packing."""

_SPIKE = 10.0  # --check-for-spiky-loss: times the largest loss seen so far

_straggler_detector = StragglerDetector()

Batch = dict[str, Any]
Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def read_microbatch(data_iterator: Iterator[Batch], *, vp_stage: int | None) -> Batch:
    """Return the next microbatch on this rank.

    Only the first tensor-parallel rank of the first and the last stage reads data, and of one that
    predicts further tokens. Its tensors, of shape (microbatch, sequence), go to the other
    tensor-parallel ranks, and under context parallelism each rank keeps its part of the sequence.

    Returns:
        The fields of the microbatch; all of them None on the stages in between.
    """
    args = get_args()
    batch: Batch = dict.fromkeys(_FIELDS)
    if not _stage_reads_data(vp_stage):
        return batch
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        sample = next(data_iterator)
        batch |= {
            field: sample[field].cuda(non_blocking=True) for field in _FIELDS if field in sample
        }
    batch = batch_on_this_tp_rank(
        batch,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
    )
    cp_group = parallel_state.get_context_parallel_group()
    return dict(get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group))


def compute_loss(loss_mask: torch.Tensor, token_losses: torch.Tensor) -> Loss:
    """Return the loss of a microbatch, summed over its tokens, as Megatron's schedules want it.

    Args:
        loss_mask: shape (microbatch, sequence), 1 where a token counts.
        token_losses: the model's output on the last stage, same shape, in nats.

    Returns:
        The sum of the losses, the number of tokens that count (int32), and the same two together
        as what is reported under ``lm loss``.
    """
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(token_losses.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    report = torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])

    check = partial(get_rerun_state_machine().validate_result, result=loss, tolerance=0.0)
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            check(rejection_func=is_bad, message=message, fatal=True)
    if args.check_for_spiky_loss:
        is_large = partial(
            get_rerun_state_machine().is_unexpectedly_large, threshold=_SPIKE, context="loss"
        )
        check(rejection_func=is_large, message="Spiky loss", fatal=False)
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[Batch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Loss]]:
    """Run one microbatch through this stage's model chunk."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    with _straggler_detector(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = read_microbatch(data_iterator, vp_stage=vp_stage)
    timer.stop()
    with _straggler_detector:
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(compute_loss, batch["loss_mask"])


def _reads_data(vp_stage: int | None) -> bool:
    first_of_tp = parallel_state.get_tensor_model_parallel_rank() == 0
    return first_of_tp and _stage_reads_data(vp_stage)


def _stage_reads_data(vp_stage: int | None) -> bool:
    return bool(is_first_or_last_pipeline_stage(vp_stage)) or _predicts_further(vp_stage)


@lru_cache
def _predicts_further(vp_stage: int | None) -> bool:
    """Whether this stage has layers of multi-token prediction, which need tokens and labels."""
    args = get_args()
    if not args.mtp_num_layers:
        return False
    return bool(
        mtp_on_this_rank(
            layout=core_transformer_config_from_args(args).pipeline_model_parallel_layout,
            mtp_num_layers=args.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def _dataset_config(args: Namespace) -> Any:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    sequences = args.per_dataset_sequences_path
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=json.loads(Path(sequences).read_text()) if sequences else None,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
    )


def build_datasets(num_samples: list[int | None], vp_stage: int | None = None) -> Any:
    """Return the training, validation and test datasets, from the data flags.

    Args:
        num_samples: how many samples to draw of each; None for one epoch.
        vp_stage: the virtual stage they are for, with an interleaved schedule.
    """
    args = get_args()
    config = _dataset_config(args)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets for GPT ...")
    reads_data = partial(_reads_data, vp_stage)
    datasets = BlendedMegatronDatasetBuilder(kind, num_samples, reads_data, config).build()
    print_rank_0("> finished creating GPT datasets ...")
    return datasets


def _embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: the first one, the last one if they are
    tied, and those that predict further tokens."""
    args = get_args()
    ranks = {pp_ranks[0]}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pp_ranks[-1])
    if args.mtp_num_layers:
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _keep_shipped_helpers() -> None:
    """Megatron runs `make` at start-up; its wheel ships the outcome and not the Makefile."""
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        from megatron.core.datasets import helpers_cpp  # noqa: F401  (an error here says enough)

        dataset_utils.compile_helpers = lambda: None


def main() -> None:
    """Parse the command line and train.

    Raises:
        SystemExit: a flag asks for what this script does not do.
    """
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    asked = [f"--{name.replace('_', '-')}" for name in NOT_HERE if getattr(args, name, None)]
    if asked:
        raise SystemExit(
            f"{', '.join(asked)}: this pretrain_gpt.py trains plain GPT models only. Use the "
            "pretrain_gpt.py of a Megatron-LM checkout for that."
        )
    _keep_shipped_helpers()
    pretrain(args, build_datasets, forward_step, get_embedding_ranks=_embedding_ranks)


# Each rank builds its own datasets, instead of rank 0 alone.
build_datasets.is_distributed = True  # type: ignore[attr-defined]

if __name__ == "__main__":
    main()
