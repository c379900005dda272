"""The order of actions of one pipeline stage, as plain data.

A schedule is written down here and nowhere else: the functions below return lists of `Action`, and
whoever needs the order reads those lists. The runtime interprets them with Megatron's own
forward step, backward step and P2P operations; the simulator runs them on a clock; the validator
checks them; the tests compare them. None of that needs a device.

Notation: p stages, this one is s (0 first), m microbatches a batch, w = p - 1 - s. Weight version 0
is the initial weights, and the update made from batch k's gradient makes version k + 1.

Sources: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503, PipeDream-2BW);
`forward_backward_pipelining_without_interleaving` and `..._with_interleaving` in
megatron/core/pipeline_parallel/schedules.py for the two synchronous schedules.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "BACKWARD_RECEIVES",
    "BACKWARD_SENDS",
    "COMMUNICATION",
    "COMPUTE",
    "FORWARD_RECEIVES",
    "FORWARD_SENDS",
    "UPDATES",
    "Action",
    "Kind",
    "Transfer",
    "interleaved_call",
    "one_f_one_b_call",
    "pipedream_2bw_call",
    "pipedream_2bw_lists",
    "synchronous_lists",
    "warmup_microbatches",
]


class Kind(enum.Enum):
    """What an action does. Communication is named after the functions of Megatron's
    `P2PCommunicator`, which do nothing on the side that the first or the last stage lacks."""

    RECV_FORWARD = "recv_forward"
    FORWARD = "forward"
    SEND_FORWARD = "send_forward"
    SEND_FORWARD_RECV_BACKWARD = "send_forward_recv_backward"
    RECV_BACKWARD = "recv_backward"
    BACKWARD = "backward"
    SEND_BACKWARD = "send_backward"
    SEND_BACKWARD_RECV_FORWARD = "send_backward_recv_forward"
    LAUNCH_UPDATE = "launch_update"
    """Copy the gradients out, post the stage's part of what crosses stages. Waits for nobody."""
    COMPLETE_UPDATE = "complete_update"
    """Wait for the total over the stages, step the optimizer, publish the version."""
    UPDATE = "update"
    """Both at once: the whole step of Megatron, collectives across stages included."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
UPDATES = frozenset({Kind.LAUNCH_UPDATE, Kind.COMPLETE_UPDATE, Kind.UPDATE})
COMMUNICATION = frozenset(Kind) - COMPUTE - UPDATES
FORWARD_SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_FORWARD_RECV_BACKWARD})
FORWARD_RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.SEND_BACKWARD_RECV_FORWARD})
BACKWARD_SENDS = frozenset({Kind.SEND_BACKWARD, Kind.SEND_BACKWARD_RECV_FORWARD})
BACKWARD_RECEIVES = frozenset({Kind.RECV_BACKWARD, Kind.SEND_FORWARD_RECV_BACKWARD})


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

    `batch` is the batch that the microbatch belongs to, or whose gradient makes the update; batches
    count from the start of the asynchronous segment (of the run, for the synchronous schedules).
    `microbatch` is the index inside its batch (-1 for updates), `version` the weight version that a
    forward or backward uses or that an update makes (-1 for communication).

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
    _check_stage(stages, stage)
    return stages - 1 - stage


def pipedream_2bw_call(
    *,
    stages: int,
    stage: int,
    batch: int,
    microbatches: int,
    next_microbatches: int | None = None,
    first: bool,
    last: bool,
    deferred: bool,
    gather_ahead: bool = False,
    reduce_late: bool = False,
    complete_after_receive: bool = False,
) -> list[Action]:
    """Return what one stage does in call `batch` of the forward-backward function.

    Megatron calls that function once per iteration. The pipeline's state (saved inputs and outputs,
    the received next input) lives on between the calls, so call k forwards the first w microbatches
    of batch k + 1 and runs the backwards of batch k. Only the first call warms up, only the last
    one drains. Batch k runs on version max(k - 1, 0), forward and backward, on every stage.

    Args:
        stages: p.
        stage: s.
        batch: k, counted from the start of the asynchronous segment. A first call with k > 0 is a
            resumed run: versions k - 1 and k are at hand, and no update is pending.
        microbatches: m of batch k, at least p - 1.
        next_microbatches: m of batch k + 1 (the same unless a batch-size schedule changes it).
            Ignored if `last`.
        first: The pipeline is empty at the start of this call.
        last: The pipeline is to be empty at the end of this call.
        deferred: Launch the update at the end of the call and complete it in the next one, right
            after backward m - w - 1 and before the communication that follows, which is the latest
            place where no other stage can be waiting for this one. Otherwise update at the end.
        gather_ahead: Complete earlier where m leaves room, by half of the slots that no stage's
            total can be late for, so that the new parameters are gathered under computation.
        reduce_late: Launch after the next call's backward 0 instead, so that the data-parallel
            reduction of the gradients runs under computation. Needs m >= p, and a gradient buffer
            for each of two batches.
        complete_after_receive: Complete after that communication instead. This is wrong on
            purpose, it makes the stages' optimizer steps wait for each other one by one, and exists
            so that tests can show that it is noticed.

    Raises:
        ValueError: m < p - 1, a stage outside 0..p-1, or a call 0 that is not the first.
    """
    ahead = warmup_microbatches(stages, stage)
    following = microbatches if next_microbatches is None or last else next_microbatches
    for count in (microbatches, following):
        if count < max(stages - 1, 1):
            raise ValueError(
                f"pipedream-2bw with {stages} pipeline stages needs at least "
                f"{max(stages - 1, 1)} microbatches in every batch, got {count}: "
                "a microbatch can only be forwarded one batch ahead"
            )
    if batch < 0:
        raise ValueError(f"batch must not be negative, got {batch}")
    if reduce_late and min(microbatches, following) < stages:
        raise ValueError(
            f"launching the update after the next call's first backward needs at least {stages} "
            f"microbatches with {stages} pipeline stages, got {min(microbatches, following)}"
        )
    if batch == 0 and not first:
        raise ValueError("call 0 starts with an empty pipeline, it must be the first")

    def locate(index: int) -> tuple[int, int]:
        """The batch and microbatch that are `index` microbatches after the start of batch k."""
        if index < microbatches:
            return batch, index
        if index < microbatches + following:
            return batch + 1, index - microbatches
        return batch + 2, index - microbatches - following

    def act(kind: Kind, index: int, receives: int | None = None) -> Action:
        number, microbatch = locate(index)
        recv_batch, recv_microbatch = (-1, -1) if receives is None else locate(receives)
        return Action(
            stage=stage,
            kind=kind,
            batch=number,
            microbatch=microbatch,
            version=max(number - 1, 0) if kind in COMPUTE else -1,
            recv_batch=recv_batch,
            recv_microbatch=recv_microbatch,
            recv_chunk=-1 if receives is None else 0,
        )

    def update(kind: Kind, number: int) -> Action:
        return Action(stage=stage, kind=kind, batch=number, version=number + 1)

    pending = deferred and not first
    late = reduce_late and not first
    complete_at = _complete_after(microbatches, stages, stage, gather_ahead, reduce_late)
    actions: list[Action] = []
    if first:
        for index in range(ahead):
            actions.append(act(Kind.RECV_FORWARD, index))
            actions.append(act(Kind.FORWARD, index))
            actions.append(act(Kind.SEND_FORWARD, index))
        if not (last and ahead >= microbatches):
            actions.append(act(Kind.RECV_FORWARD, ahead))
    for i in range(microbatches):
        index = ahead + i
        if last and index >= microbatches:
            actions.append(act(Kind.RECV_BACKWARD, i))
        else:
            actions.append(act(Kind.FORWARD, index))
            actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, index, receives=i))
        actions.append(act(Kind.BACKWARD, i))
        if last and index + 1 >= microbatches:
            send = act(Kind.SEND_BACKWARD, i)
        else:
            send = act(Kind.SEND_BACKWARD_RECV_FORWARD, i, receives=index + 1)
        if late and i == 0:
            actions.append(update(Kind.LAUNCH_UPDATE, batch - 1))
        if pending and i == complete_at:
            complete = update(Kind.COMPLETE_UPDATE, batch - 1)
            actions.extend([send, complete] if complete_after_receive else [complete, send])
        else:
            actions.append(send)
    if not deferred:
        actions.append(update(Kind.UPDATE, batch))
        return actions
    if last or not reduce_late:
        actions.append(update(Kind.LAUNCH_UPDATE, batch))
    # Nothing of the next call is to come before the completion: for m = w, already its first
    # forward needs the version.
    if last or _complete_after(following, stages, stage, gather_ahead, reduce_late) < 0:
        actions.append(update(Kind.COMPLETE_UPDATE, batch))
    return actions


def _complete_after(
    microbatches: int, stages: int, stage: int, gather_ahead: bool, reduce_late: bool
) -> int:
    """Return the backward after which the batch before's update is completed; negative if that is
    before the first."""
    latest = microbatches - warmup_microbatches(stages, stage) - 1
    # Stage 0's total is known to all when stage 0 has launched; so much later is `latest` there.
    room = microbatches - stages + (0 if reduce_late else 1)
    return latest - ((room + 1) // 2 if gather_ahead and room > 0 else 0)


def pipedream_2bw_lists(
    *,
    stages: int,
    microbatches: Sequence[int],
    deferred: bool,
    first_batch: int = 0,
    drain: bool = True,
    gather_ahead: bool = False,
    reduce_late: bool = False,
    complete_after_receive: bool = False,
) -> list[list[Action]]:
    """Return each stage's actions over len(microbatches) calls, one count of microbatches a call.

    `first_batch` > 0 starts as a resumed run does. Without `drain` the last call leaves w
    microbatches in flight, as between two iterations.
    """
    calls = len(microbatches)
    return [
        [
            action
            for call, count in enumerate(microbatches)
            for action in pipedream_2bw_call(
                stages=stages,
                stage=stage,
                batch=first_batch + call,
                microbatches=count,
                next_microbatches=microbatches[call + 1] if call + 1 < calls else None,
                first=call == 0,
                last=drain and call == calls - 1,
                deferred=deferred,
                gather_ahead=gather_ahead,
                reduce_late=reduce_late,
                complete_after_receive=complete_after_receive,
            )
        ]
        for stage in range(stages)
    ]


def one_f_one_b_call(*, stages: int, stage: int, batch: int, microbatches: int) -> list[Action]:
    """Return what one stage does in one iteration of Megatron's synchronous 1F1B."""
    if microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {microbatches}")
    warmup = min(warmup_microbatches(stages, stage), microbatches)

    def act(kind: Kind, microbatch: int, receives: int | None = None) -> Action:
        return Action(
            stage=stage,
            kind=kind,
            batch=batch,
            microbatch=microbatch,
            version=batch if kind in COMPUTE else -1,
            recv_batch=-1 if receives is None else batch,
            recv_microbatch=-1 if receives is None else receives,
            recv_chunk=-1 if receives is None else 0,
        )

    actions: list[Action] = []
    for i in range(warmup):
        actions.append(act(Kind.RECV_FORWARD, i))
        actions.append(act(Kind.FORWARD, i))
        actions.append(act(Kind.SEND_FORWARD, i))
    steady = microbatches - warmup
    if steady:
        actions.append(act(Kind.RECV_FORWARD, warmup))
    for i in range(steady):
        actions.append(act(Kind.FORWARD, warmup + i))
        actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, warmup + i, receives=i))
        actions.append(act(Kind.BACKWARD, i))
        if i == steady - 1:
            actions.append(act(Kind.SEND_BACKWARD, i))
        else:
            actions.append(act(Kind.SEND_BACKWARD_RECV_FORWARD, i, receives=warmup + i + 1))
    for i in range(steady, microbatches):
        actions.append(act(Kind.RECV_BACKWARD, i))
        actions.append(act(Kind.BACKWARD, i))
        actions.append(act(Kind.SEND_BACKWARD, i))
    actions.append(Action(stage=stage, kind=Kind.UPDATE, batch=batch, version=batch + 1))
    return actions


def interleaved_call(
    *, stages: int, stage: int, batch: int, microbatches: int, chunks: int
) -> list[Action]:
    """Return what one stage does in one iteration of Megatron's synchronous interleaved 1F1B.

    Virtual stage c * p + s is model chunk c of stage s. Each receive stands right before the
    computation that needs it and each send right after the one that made it, which is what
    Megatron's default (`--overlap-p2p-communication`, asynchronous sends) comes to.

    Raises:
        ValueError: fewer than 2 chunks or stages, or m not a multiple of p (Megatron also takes
            some others; they idle more).
    """
    _check_stage(stages, stage)
    if chunks < 2 or stages < 2:
        raise ValueError(
            f"interleaved 1F1B needs at least 2 stages and 2 model chunks a stage, "
            f"got {stages} stages and {chunks} chunks"
        )
    if microbatches < 1 or microbatches % stages:
        raise ValueError(
            f"interleaved 1F1B needs a multiple of {stages} microbatches (the number of pipeline "
            f"stages), got {microbatches}"
        )
    total = microbatches * chunks
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    # Megatron's schedule table: groups of p microbatches, each through all chunks in turn.
    order = [
        (group + offset, chunk)
        for group in range(0, microbatches, stages)
        for chunk in range(chunks)
        for offset in range(stages)
    ]
    actions: list[Action] = []

    def act(kind: Kind, microbatch: int, chunk: int) -> None:
        version = batch if kind in COMPUTE else -1
        actions.append(
            Action(
                stage=stage,
                kind=kind,
                batch=batch,
                microbatch=microbatch,
                version=version,
                chunk=chunk,
            )
        )

    def forward(index: int) -> None:
        microbatch, chunk = order[index]
        for kind in (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD):
            act(kind, microbatch, chunk)

    def backward(index: int) -> None:
        microbatch, chunk = order[index]
        for kind in (Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD):
            act(kind, microbatch, chunks - 1 - chunk)

    for index in range(warmup):
        forward(index)
    for index in range(total - warmup):
        forward(warmup + index)
        backward(index)
    for index in range(total - warmup, total):
        backward(index)
    actions.append(Action(stage=stage, kind=Kind.UPDATE, batch=batch, version=batch + 1))
    return actions


def synchronous_lists(
    *, stages: int, microbatches: Sequence[int], chunks: int = 1
) -> list[list[Action]]:
    """Return each stage's actions over len(microbatches) iterations of 1F1B, interleaved if
    `chunks` > 1."""
    lists: list[list[Action]] = []
    for stage in range(stages):
        actions: list[Action] = []
        for batch, count in enumerate(microbatches):
            if chunks > 1:
                actions += interleaved_call(
                    stages=stages, stage=stage, batch=batch, microbatches=count, chunks=chunks
                )
            else:
                actions += one_f_one_b_call(
                    stages=stages, stage=stage, batch=batch, microbatches=count
                )
        lists.append(actions)
    return lists


def _check_stage(stages: int, stage: int) -> None:
    if stages < 1 or not 0 <= stage < stages:
        raise ValueError(f"stage {stage} does not exist in a pipeline of {stages} stages")
