"""PipeDream with weight stashing: stage s has a delay of p - 1 - s updates.

It is here to be compared with: the order of actions and what they cost are in
:mod:`megatron_async.schedules.pipedream_actions`.
"""

from typing import Any

from megatron_async.schedules.actions import Action
from megatron_async.schedules.pipedream_actions import pipedream_call
from megatron_async.schedules.pipeline import Pipeline

__all__ = ["PipeDream"]


class PipeDream(Pipeline):
    """p - s weight versions and (p - 1 - s) m + 1 microbatches in flight on stage s.

    Raises:
        ValueError: the update is deferred.
    """

    name = "pipedream"
    # It would take all of the weight versions.
    resumable = False

    def __init__(self, *, before_next_batch: Any = None, **kwargs: Any) -> None:
        # A resumed run forwards everything anew, from the random state of when it was saved.
        super().__init__(**kwargs)
        if self._deferred:
            raise ValueError("--deferred-update: pipedream's last stage has no delay to hide it in")

    def actions(
        self,
        *,
        stages: int,
        stage: int,
        num_microbatches: int,
        next_num_microbatches: int,
        batches_left: int,
    ) -> list[Action]:
        if stages > 1 and batches_left > 1 and next_num_microbatches != num_microbatches:
            raise ValueError(
                f"pipedream needs the same number of microbatches in every batch, and after "
                f"{num_microbatches} come {next_num_microbatches}: drop --step-batch-size-schedule"
            )
        return pipedream_call(
            stages=stages,
            stage=stage,
            batch=self.batch,
            microbatches=num_microbatches,
            batches_left=batches_left,
        )
