"""The order of actions of PipeDream with weight stashing, as plain data.

Notation as in :mod:`megatron_async.schedules.actions`: p stages, this one is s, m microbatches a
batch, w = p - 1 - s. Here w counts batches: stage s forwards a batch w updates before the batch's
own gradient makes one, so that its gradient is w updates old. The last stage has no delay.

PipeDream updates after each minibatch. A minibatch is a batch of m microbatches here, whose
gradients are summed: one update a batch, as in training without a delay, with which it is to be
compared. Batches follow each other in 1F1B order, microbatch by microbatch: one microbatch of batch
k + w forward, one of batch k backward. The update closes the call, because the last stage's next
forward needs it; with it closes the pipeline, by p - 1 backwards.

Sources: "PipeDream: Generalized Pipeline Parallelism for DNN Training" (SOSP 2019), section 3.3
(weight stashing); arXiv 2006.09503, section 2, for its delay of p - 1 - s updates.
"""

from megatron_async.schedules.actions import COMPUTE, Action, Kind, warmup_microbatches

__all__ = ["microbatches_ahead", "pipedream_call", "pipedream_delay", "pipedream_lists"]


def pipedream_delay(stages: int, stage: int) -> int:
    """w: by how many updates the gradients of a stage are stale, and how many batches it runs ahead
    of its own backwards."""
    return warmup_microbatches(stages, stage)


def microbatches_ahead(*, stages: int, stage: int, microbatches: int) -> int:
    """w m: how many microbatches a stage keeps in flight between two calls."""
    return pipedream_delay(stages, stage) * microbatches


def pipedream_call(
    *,
    stages: int,
    stage: int,
    batch: int,
    microbatches: int,
    batches_left: int | None = None,
) -> list[Action]:
    """Return what one stage does in call ``batch`` of the forward-backward function.

    Call k runs the microbatches of batch k + w forward, on version k, the newest, and those of
    batch k backward, on the version that they were forwarded on, max(k - w, 0). In between stand
    Megatron's combined transfers, in the order of 1F1B: stage s sends microbatch i of batch k + w
    to stage s + 1 while it receives the gradient of microbatch i of batch k from it. So stage s + 1
    always holds the m inputs of the batch that it forwards in its next call.

    Call 0 warms up: w whole batches forward, on version 0. What is known not to come is left out,
    so the last w calls drain.

    Args:
        stages: p.
        stage: s.
        batch: k, counted from the start of the asynchronous segment. Call 0 begins with an empty
            pipeline.
        microbatches: m, of all batches.
        batches_left: How many batches the segment still has, batch k included; None if its end is
            not in sight.

    Raises:
        ValueError: m < 1, a stage outside 0..p-1, or no batch left.
    """
    delay = pipedream_delay(stages, stage)
    if microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {microbatches}")
    if batch < 0:
        raise ValueError(f"batch must not be negative, got {batch}")
    if batches_left is not None and batches_left < 1:
        raise ValueError(f"batch {batch} is no batch of the segment: {batches_left} are left")

    def comes(number: int) -> bool:
        return batches_left is None or number < batch + batches_left

    def act(
        kind: Kind, number: int, microbatch: int, receives: tuple[int, int] | None = None
    ) -> Action:
        recv_batch, recv_microbatch = receives or (-1, -1)
        return Action(
            stage=stage,
            kind=kind,
            batch=number,
            microbatch=microbatch,
            version=max(number - delay, 0) if kind in COMPUTE else -1,
            recv_batch=recv_batch,
            recv_microbatch=recv_microbatch,
            recv_chunk=-1 if receives is None else 0,
        )

    actions: list[Action] = []
    if batch == 0:
        for number in filter(comes, range(delay)):
            for i in range(microbatches):
                actions.append(act(Kind.RECV_FORWARD, number, i))
                actions.append(act(Kind.FORWARD, number, i))
                actions.append(act(Kind.SEND_FORWARD, number, i))
        if comes(delay):
            actions.extend(act(Kind.RECV_FORWARD, delay, i) for i in range(microbatches))
    ahead = batch + delay
    for i in range(microbatches):
        if comes(ahead):
            actions.append(act(Kind.FORWARD, ahead, i))
            actions.append(act(Kind.SEND_FORWARD_RECV_BACKWARD, ahead, i, receives=(batch, i)))
        else:
            actions.append(act(Kind.RECV_BACKWARD, batch, i))
        actions.append(act(Kind.BACKWARD, batch, i))
        if comes(ahead + 1):
            receives = (ahead + 1, i)
            actions.append(act(Kind.SEND_BACKWARD_RECV_FORWARD, batch, i, receives=receives))
        else:
            actions.append(act(Kind.SEND_BACKWARD, batch, i))
    actions.append(Action(stage=stage, kind=Kind.UPDATE, batch=batch, version=batch + 1))
    return actions


def pipedream_lists(
    *, stages: int, microbatches: int, batches: int, drain: bool = True
) -> list[list[Action]]:
    """Return each stage's actions over as many calls as there are batches.

    Without ``drain`` the last call leaves w batches in flight, as between two iterations.
    """
    return [
        [
            action
            for batch in range(batches)
            for action in pipedream_call(
                stages=stages,
                stage=stage,
                batch=batch,
                microbatches=microbatches,
                batches_left=batches - batch if drain else None,
            )
        ]
        for stage in range(stages)
    ]
