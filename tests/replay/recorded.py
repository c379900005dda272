"""The run that tests look at: PP 2 x DP 2, tied, distributed optimizer, both overlaps, buckets."""

from pathlib import Path

from megatron_async.replay.trace import Trace, read_all
from tests.support.gpt import gpt_args
from tests.support.torchrun import run_torchrun

__all__ = ["ITERATIONS", "MICROBATCHES", "REPLICAS", "STAGES", "record"]

STAGES, REPLICAS, MICROBATCHES, ITERATIONS = 2, 2, 4, 6


def record(directory: Path) -> list[Trace]:
    """Run it, and return the traces of all ranks."""
    run_torchrun(
        STAGES * REPLICAS,
        gpt_args(
            pipeline_model_parallel_size=STAGES,
            num_layers=4,
            hidden_size=16,
            num_attention_heads=2,
            seq_length=16,
            max_position_embeddings=16,
            vocab_size=64,
            make_vocab_size_divisible_by=64,
            micro_batch_size=1,
            global_batch_size=MICROBATCHES * REPLICAS,
            train_iters=ITERATIONS,
            pipeline_schedule="pipedream-2bw",
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            ddp_bucket_size=3000,
            ddp_bucket_all_stages=True,
            log_enqueues=directory,
        ),
        launcher="plugin",
    )
    return read_all(directory)
