"""Hooks into Megatron's wrapping of the model in ``DistributedDataParallel``."""

import functools
from typing import Any

from megatron_async.config.settings import AsyncConfig
from megatron_async.hooks.row import hook, row

__all__ = ["ROWS", "bucket_all_stages"]


@hook
def bucket_all_stages(original: Any) -> Any:
    @functools.wraps(original)
    def ddp_wrap(*args: Any, pg_collection: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        from megatron_async.megatron.data_parallel import as_first_stage

        config = AsyncConfig.from_args(get_args())
        if config.asynchronous and config.bucket_all_stages:
            pg_collection = as_first_stage(pg_collection)
        return original(*args, pg_collection=pg_collection, **kwargs)

    return ddp_wrap


ROWS = (
    row(
        "megatron.training.models.dist_utils",
        "_ddp_wrap",
        bucket_all_stages,
        "with --ddp-bucket-all-stages gradients are reduced bucket by bucket on every stage",
    ),
)
