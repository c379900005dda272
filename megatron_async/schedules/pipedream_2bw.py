"""PipeDream-2BW: a gradient that is one update old on every stage, and no pipeline flush.

Source: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1.
"""

from megatron_async.schedules.actions import Action, pipedream_2bw_call
from megatron_async.schedules.pipeline import Pipeline

__all__ = ["PipeDream2BW"]


class PipeDream2BW(Pipeline):
    """Two weight versions on every stage; needs at least p - 1 microbatches a batch."""

    name = "pipedream-2bw"
    resumable = True

    def actions(
        self,
        *,
        stages: int,
        stage: int,
        num_microbatches: int,
        next_num_microbatches: int,
        batches_left: int,
    ) -> list[Action]:
        return pipedream_2bw_call(
            stages=stages,
            stage=stage,
            batch=self.batch,
            microbatches=num_microbatches,
            next_microbatches=next_num_microbatches,
            first=not self.filled,
            last=batches_left == 1,
            deferred=self._deferred,
            gather_ahead=self._gather_ahead,
            reduce_late=self._reduce_late,
        )
