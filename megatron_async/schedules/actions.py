"""What a pipeline stage does, as plain data.

A schedule is a list of `Action` for each call of each stage, and whoever needs the order reads
those lists. The runtime interprets them with Megatron's own forward step, backward step and P2P
operations; the simulator runs them on a clock; the validator checks them; the tests compare them.
None of that needs a device.

Notation: p stages, this one is s (0 first), m microbatches a batch, w = p - 1 - s. Weight version 0
is the initial weights, and the update made from batch k's gradient makes version k + 1.

Source of the names: `P2PCommunicator` in megatron/core/pipeline_parallel/p2p_communication.py.
"""

import enum
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "BACKWARD_RECEIVES",
    "BACKWARD_SENDS",
    "COMMUNICATION",
    "COMPUTE",
    "FINISHED_RECEIVES",
    "FORWARD_RECEIVES",
    "FORWARD_SENDS",
    "GATHERS",
    "POSTED_RECEIVES",
    "REDUCTIONS",
    "UNWAITED_SENDS",
    "UPDATES",
    "Action",
    "Kind",
    "Transfer",
    "check_stage",
    "warmup_microbatches",
]


class Kind(enum.Enum):
    """What an action does. Communication that is waited for is named after the functions of
    Megatron's `P2PCommunicator`, which do nothing on the side that the first or the last stage
    lacks; nor does what is started and finished."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    SEND_FORWARD_RECV_BACKWARD = "send_forward_recv_backward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    BACKWARD_WEIGHT = "backward_weight"
    """The gradient of the weights, where a schedule puts it off; `BACKWARD` is that of the input
    alone, then."""
    SEND_BACKWARD = "send_backward"
    SEND_BACKWARD_RECV_FORWARD = "send_backward_recv_forward"
    START_RECV_FORWARD = "start_recv_forward"
    """Post a receive, and go on; likewise the other three."""
    FINISH_RECV_FORWARD = "finish_recv_forward"
    """Wait for what was posted; likewise for a backward."""
    START_SEND_FORWARD = "start_send_forward"
    """Send, and wait for nobody, now or later."""
    START_RECV_BACKWARD = "start_recv_backward"
    FINISH_RECV_BACKWARD = "finish_recv_backward"
    START_SEND_BACKWARD = "start_send_backward"
    START_REDUCTION = "start_reduction"
    """From here on a backward's gradients are reduced over the stage's own ranks (data, tensor,
    expert parallel), as far as the run's flags let that overlap. Stands before a batch's last
    backward."""
    FINISH_REDUCTION = "finish_reduction"
    """Wait for the reduction of a batch's gradients, or make it."""
    LAUNCH_UPDATE = "launch_update"
    """Copy the gradients out, post the stage's part of what crosses stages. Waits for nobody."""
    COMPLETE_UPDATE = "complete_update"
    """Wait for the total over the stages, step the optimizer, publish the version."""
    UPDATE = "update"
    """Both at once: the whole step of Megatron, collectives across stages included."""
    START_GATHER = "start_gather"
    """Begin to gather the parameters of the version just made (``--overlap-param-gather``)."""
    FINISH_GATHER = "finish_gather"
    """Wait for that. Stands before the first computation on the version."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
REDUCTIONS = frozenset({Kind.START_REDUCTION, Kind.FINISH_REDUCTION})
UPDATES = frozenset({Kind.LAUNCH_UPDATE, Kind.COMPLETE_UPDATE, Kind.UPDATE})
GATHERS = frozenset({Kind.START_GATHER, Kind.FINISH_GATHER})
COMMUNICATION = frozenset(Kind) - COMPUTE - REDUCTIONS - UPDATES - GATHERS
"""Between stages."""
FORWARD_SENDS = frozenset(
    {Kind.SEND_FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD, Kind.START_SEND_FORWARD}
)
FORWARD_RECEIVES = frozenset(
    {Kind.RECV_FORWARD, Kind.SEND_BACKWARD_RECV_FORWARD, Kind.FINISH_RECV_FORWARD}
)
BACKWARD_SENDS = frozenset(
    {Kind.SEND_BACKWARD, Kind.SEND_BACKWARD_RECV_FORWARD, Kind.START_SEND_BACKWARD}
)
BACKWARD_RECEIVES = frozenset(
    {Kind.RECV_BACKWARD, Kind.SEND_FORWARD_RECV_BACKWARD, Kind.FINISH_RECV_BACKWARD}
)
POSTED_RECEIVES = frozenset({Kind.START_RECV_FORWARD, Kind.START_RECV_BACKWARD})
FINISHED_RECEIVES = frozenset({Kind.FINISH_RECV_FORWARD, Kind.FINISH_RECV_BACKWARD})
UNWAITED_SENDS = frozenset({Kind.START_SEND_FORWARD, Kind.START_SEND_BACKWARD})


class Transfer(NamedTuple):
    """One tensor on its way: the activations (forward) or their gradient (backward) of one
    microbatch, across the border between virtual stages `border` and `border + 1`. Virtual stage
    c * p + s is model chunk c of stage s."""

    forward: bool
    batch: int
    microbatch: int
    border: int

    def sender(self, stages: int) -> int:
        """The stage that sends it."""
        return (self.border if self.forward else self.border + 1) % stages

    def receiver(self, stages: int) -> int:
        """The stage that receives it."""
        return (self.border + 1 if self.forward else self.border) % stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that one stage does.

    `batch` is the batch that the microbatch belongs to, or whose gradient is reduced or makes the
    update; batches count from the start of the asynchronous segment (of the run, for the
    synchronous schedules). `microbatch` is the index inside its batch (-1 where none is meant),
    `version` the weight version that a forward or backward uses or that an update makes and a
    gather completes (-1 for communication and reductions).

    For communication, `batch`, `microbatch` and `chunk` name what is sent, or what is received
    where nothing is sent; the `recv_` fields name what a combined operation receives (-1
    elsewhere).
    `chunk` is the virtual stage on this rank, 0 unless the schedule is interleaved.
    """

    stage: int
    kind: Kind
    batch: int
    microbatch: int = -1
    version: int = -1
    chunk: int = 0
    recv_batch: int = -1
    recv_microbatch: int = -1
    recv_chunk: int = -1

    def sent(self, *, stages: int, chunks: int = 1) -> Transfer | None:
        """What the action sends; None if nothing, or if the model ends there."""
        if self.kind in FORWARD_SENDS:
            border = self.chunk * stages + self.stage
        elif self.kind in BACKWARD_SENDS:
            border = self.chunk * stages + self.stage - 1
        else:
            return None
        if not 0 <= border < stages * chunks - 1:
            return None
        return Transfer(self.kind in FORWARD_SENDS, self.batch, self.microbatch, border)

    def posted(self, *, stages: int) -> Transfer | None:
        """What a receive that the action posts is for; None if it posts none, or if the model
        begins or ends there."""
        if self.kind not in POSTED_RECEIVES:
            return None
        forward = self.kind is Kind.START_RECV_FORWARD
        border = self.stage - 1 if forward else self.stage
        if not 0 <= border < stages - 1:
            return None
        return Transfer(forward, self.batch, self.microbatch, border)

    def received(self, *, stages: int, chunks: int = 1) -> Transfer | None:
        """What the action receives; None if nothing, or if the model begins there."""
        combined = self.kind in FORWARD_SENDS or self.kind in BACKWARD_SENDS
        chunk = self.recv_chunk if combined else self.chunk
        if self.kind in FORWARD_RECEIVES:
            border = chunk * stages + self.stage - 1
        elif self.kind in BACKWARD_RECEIVES:
            border = chunk * stages + self.stage
        else:
            return None
        if not 0 <= border < stages * chunks - 1:
            return None
        batch = self.recv_batch if combined else self.batch
        microbatch = self.recv_microbatch if combined else self.microbatch
        return Transfer(self.kind in FORWARD_RECEIVES, batch, microbatch, border)

    def __str__(self) -> str:
        """For example `forward(batch 3, microbatch 0, version 2)`."""
        parts = [f"batch {self.batch}"]
        if self.microbatch >= 0:
            parts.append(f"microbatch {self.microbatch}")
        if self.chunk > 0:
            parts.append(f"chunk {self.chunk}")
        if self.version >= 0:
            parts.append(f"version {self.version}")
        if self.recv_batch >= 0:
            parts.append(f"receiving batch {self.recv_batch} microbatch {self.recv_microbatch}")
        return f"{self.kind.value}({', '.join(parts)})"


def warmup_microbatches(stages: int, stage: int) -> int:
    """w = p - 1 - s: how many forwards a stage runs ahead of its first backward."""
    check_stage(stages, stage)
    return stages - 1 - stage


def check_stage(stages: int, stage: int) -> None:
    """Refuse a stage that does not exist.

    Raises:
        ValueError: a stage outside of 0..p-1.
    """
    if stages < 1 or not 0 <= stage < stages:
        raise ValueError(f"stage {stage} does not exist in a pipeline of {stages} stages")
