"""1F1B without a flush between batches: the order that several asynchronous schedules share.

Megatron calls the forward-backward function once per iteration. The pipeline's state (saved inputs
and outputs, the received next input) lives on between the calls, so call k forwards the first a
microbatches of batch k + 1 and runs the backwards of batch k. Only the first call warms up, only
the last one drains. A stage runs a = w microbatches ahead, as in 1F1B, or e_s more
(``--pipeline-extra-warmup``): then messages may be late without holding the stages up, sends are
waited for by nobody, and each receive is posted while the one before is worked on.

What differs between schedules is how many microbatches of each batch, c of its m, run on the
version before the newest (are *delayed*), and with it where an update has to be complete. The
microbatch that first needs version k + 1, which batch k's gradient makes, is the one that comes c
microbatches after the start of batch k + 1. So the update of batch k is completed right after
backward c - a - 1 of call k + 1 and before the communication that follows, which is the latest
place where no other stage can be waiting for this one: behind the receive that follows, "before
the first forward", the stages' steps would queue along the chain of forwards. Where c = a, already
the call's first forward needs the version, and the update is completed at the end of call k.

Notation as in :mod:`megatron_async.schedules.actions`.

Source: "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), section 3.1, for the
order of forwards and backwards; the deferred update is this package's own.
"""

from collections.abc import Callable

from megatron_async.schedules.actions import COMPUTE, Action, Kind, warmup_microbatches
from megatron_async.schedules.schedule import Call, Pipeline, VersionRule, extra_ahead

__all__ = ["completed_after", "fewest_delayed", "unflushed_call"]


def unflushed_call(
    call: Call, *, name: str, rule: VersionRule, delayed: Callable[[int], int]
) -> list[Action]:
    """Return what one stage does in a call.

    Args:
        call: the call.
        name: of the schedule, for messages.
        rule: the weight versions of all batches.
        delayed: c, from the number of microbatches of a batch; from :func:`fewest_delayed` to m.

    Raises:
        ValueError: too few microbatches, c out of range, a stage outside 0..p-1, or a negative
            batch.
    """
    following = call.microbatches if call.last else call.next_microbatches
    _check(call, (call.microbatches, following), name=name, delayed=delayed)
    return _Builder(call, rule, delayed, following).build()


def fewest_delayed(pipeline: Pipeline) -> int:
    """Return the smallest c: as many microbatches as the first stage runs ahead, and one more if
    the gradients are reduced under the next batch's first."""
    return pipeline.stages - 1 + pipeline.extra_warmup + (1 if pipeline.reduce_late else 0)


def completed_after(pipeline: Pipeline, stage: int, delayed: int) -> int:
    """Return the backward after which the update of the batch before is completed; negative if that
    is before the call's first.

    Without gathers under computation that is the latest place. With them it is earlier by half of
    the slots that no stage's total can be late for, so that the new parameters are gathered under
    computation.

    Args:
        pipeline: the run's.
        stage: s.
        delayed: c of the running batch.
    """
    latest = delayed - _ahead(pipeline, stage) - 1
    # Stage 0's total is known to all when stage 0 has launched; so much later is `latest` there.
    room = delayed - fewest_delayed(pipeline)
    return latest - ((room + 1) // 2 if pipeline.gather_ahead and room > 0 else 0)


def _ahead(pipeline: Pipeline, stage: int) -> int:
    """a: how many microbatches a stage runs ahead of its own backwards."""
    return warmup_microbatches(pipeline.stages, stage) + extra_ahead(pipeline, stage)


def _check(
    call: Call, counts: tuple[int, int], *, name: str, delayed: Callable[[int], int]
) -> None:
    stages, fewest = call.pipeline.stages, fewest_delayed(call.pipeline)
    extra = call.pipeline.extra_warmup
    more = f" and {extra} more in flight" if extra else ""
    least = max(stages - 1 + extra, 1)
    for count in counts:
        if count < least:
            raise ValueError(
                f"{name} with {stages} pipeline stages{more} needs at least {least} microbatches "
                f"in every batch, got {count}: a microbatch can only be forwarded one batch ahead"
            )
        c = delayed(count)
        if call.pipeline.reduce_late and c < fewest:
            raise ValueError(
                f"launching the update after the next call's first backward needs at least "
                f"{fewest} microbatches on the version before the newest with {stages} pipeline "
                f"stages{more}, got {c}"
            )
        if not fewest <= c <= count:
            raise ValueError(
                f"{name} with {stages} pipeline stages{more} and {count} microbatches runs from "
                f"{fewest} to {count} of them on the version before the newest, got {c}"
            )
    if call.batch < call.start or call.start < 0:
        raise ValueError(f"batch {call.batch} is not in a segment that starts at {call.start}")


class _Builder:
    """Makes the list of one call."""

    def __init__(
        self, call: Call, rule: VersionRule, delayed: Callable[[int], int], following: int
    ) -> None:
        self.call = call
        self.rule = rule
        self.following = following
        self.ahead = _ahead(call.pipeline, call.stage)
        self.delayed = delayed(call.microbatches)
        self.complete_at = completed_after(call.pipeline, call.stage, self.delayed)
        self.completed_next = completed_after(call.pipeline, call.stage, delayed(following))
        self.actions: list[Action] = []

    def build(self) -> list[Action]:
        call, pipeline, ahead = self.call, self.call.pipeline, self.ahead
        link = _Posted(self) if pipeline.extra_warmup else _Waited(self)
        if call.first:
            link.open()
            for index in range(min(ahead, call.microbatches) if call.last else ahead):
                link.before_warmup(index)
                self.forward(index)
                link.after_warmup(index)
            link.warmed_up()
        for i in range(call.microbatches):
            index = ahead + i
            if self.comes(index):
                link.before_forward(index)
                self.forward(index)
            link.between(index, i)
            if i == call.microbatches - 1:
                self.plain(Kind.START_REDUCTION, call.batch)
            self.actions.append(self.act(Kind.BACKWARD, i))
            launches = pipeline.reduce_late and i == 0 and not call.first
            completes = pipeline.deferred and not call.first and i == self.complete_at
            if completes and not launches:
                self.step(Kind.COMPLETE_UPDATE, call.batch - 1)
            link.after_backward(index, i)
            if launches:
                # Not before: what the update posts may wait for stages that wait for this backward.
                self.launch(call.batch - 1)
                if completes:  # on the first stage alone, which receives nothing there
                    self.step(Kind.COMPLETE_UPDATE, call.batch - 1)
        self.end()
        return self.actions

    def end(self) -> None:
        """The updates at the end of the call."""
        call, pipeline = self.call, self.call.pipeline
        # What the next call's first forward needs; nothing is computed in between.
        closing = None if call.last else self.first_use(self.ahead + call.microbatches)
        made_before = closing is not None and closing <= call.batch
        if not pipeline.deferred:
            self.plain(Kind.FINISH_REDUCTION, call.batch)
        elif call.last or not pipeline.reduce_late:
            self.launch(call.batch)
        if made_before:
            self.finish_gather(closing)
        if not pipeline.deferred:
            self.step(Kind.UPDATE, call.batch)
        elif call.last or self.completed_next < 0:
            self.step(Kind.COMPLETE_UPDATE, call.batch)
        if not made_before:
            self.finish_gather(closing)
        if call.last and pipeline.gather_ahead:
            self.finish_gather(call.batch + 1)

    def locate(self, index: int) -> tuple[int, int]:
        """The batch and microbatch that are `index` microbatches after the start of batch k."""
        call = self.call
        if index < call.microbatches:
            return call.batch, index
        if index < call.microbatches + self.following:
            return call.batch + 1, index - call.microbatches
        return call.batch + 2, index - call.microbatches - self.following

    def comes(self, index: int) -> bool:
        """Whether there is such a microbatch: the last batch is followed by none."""
        return not self.call.last or index < self.call.microbatches

    def act(self, kind: Kind, index: int, receives: int | None = None) -> Action:
        number, microbatch = self.locate(index)
        recv_batch, recv_microbatch = (-1, -1) if receives is None else self.locate(receives)
        version = -1
        if kind in COMPUTE:
            uses = self.rule.forward if kind is Kind.FORWARD else self.rule.backward
            version = uses(number, microbatch, self.call.stage)
        return Action(
            stage=self.call.stage,
            kind=kind,
            batch=number,
            microbatch=microbatch,
            version=version,
            recv_batch=recv_batch,
            recv_microbatch=recv_microbatch,
            recv_chunk=-1 if receives is None else 0,
        )

    def plain(self, kind: Kind, batch: int, version: int = -1) -> None:
        self.actions.append(Action(stage=self.call.stage, kind=kind, batch=batch, version=version))

    def first_use(self, index: int) -> int | None:
        """The version that the forward of `index` is the first one on, if it was made in this
        segment and has to be gathered."""
        call = self.call
        if not call.pipeline.gather_ahead or index == 0:
            return None
        before, version = (
            self.rule.forward(*self.locate(each), call.stage) for each in (index - 1, index)
        )
        return version if before < version and version > call.start else None

    def finish_gather(self, version: int | None) -> None:
        if version is not None:
            self.plain(Kind.FINISH_GATHER, version - 1, version)

    def forward(self, index: int) -> None:
        if self.call.first or index > self.ahead:  # else the end of the call before has it
            self.finish_gather(self.first_use(index))
        self.actions.append(self.act(Kind.FORWARD, index))

    def launch(self, number: int) -> None:
        self.plain(Kind.FINISH_REDUCTION, number)
        self.plain(Kind.LAUNCH_UPDATE, number, number + 1)

    def step(self, kind: Kind, number: int) -> None:
        call, gathers = self.call, self.call.pipeline.gather_ahead
        if gathers and number == call.batch and call.last and not call.first:
            # The newest version need not have been used before the next one is made.
            gathered = any(
                action.kind is Kind.FINISH_GATHER and action.version == call.batch
                for action in self.actions
            )
            if not gathered and self.delayed > self.ahead:
                self.finish_gather(call.batch)
        self.plain(kind, number, number + 1)
        if gathers:
            self.plain(Kind.START_GATHER, number, number + 1)


class _Waited:
    """Megatron's own communication, in the order of 1F1B: each transfer is waited for."""

    def __init__(self, builder: _Builder) -> None:
        self.builder = builder
        self.add = builder.actions.append
        self.act = builder.act

    def open(self) -> None:
        """Before the first action of a segment."""

    def before_warmup(self, index: int) -> None:
        self.add(self.act(Kind.RECV_FORWARD, index))

    def after_warmup(self, index: int) -> None:
        self.add(self.act(Kind.SEND_FORWARD, index))

    def warmed_up(self) -> None:
        if self.builder.comes(self.builder.ahead):
            self.add(self.act(Kind.RECV_FORWARD, self.builder.ahead))

    def before_forward(self, index: int) -> None:
        """Its input was received with the send of the backward before."""

    def between(self, index: int, backward: int) -> None:
        """Between a forward, if it comes, and a backward."""
        if self.builder.comes(index):
            self.add(self.act(Kind.SEND_FORWARD_RECV_BACKWARD, index, receives=backward))
        else:
            self.add(self.act(Kind.RECV_BACKWARD, backward))

    def after_backward(self, index: int, backward: int) -> None:
        if self.builder.comes(index + 1):
            self.add(self.act(Kind.SEND_BACKWARD_RECV_FORWARD, backward, receives=index + 1))
        else:
            self.add(self.act(Kind.SEND_BACKWARD, backward))


class _Posted(_Waited):
    """Sends that nobody waits for, and receives that are posted one ahead."""

    def open(self) -> None:
        self.add(self.act(Kind.START_RECV_FORWARD, 0))

    def before_warmup(self, index: int) -> None:
        self.before_forward(index)

    def after_warmup(self, index: int) -> None:
        self.add(self.act(Kind.START_SEND_FORWARD, index))

    def warmed_up(self) -> None:
        self.add(self.act(Kind.START_RECV_BACKWARD, 0))

    def before_forward(self, index: int) -> None:
        self.add(self.act(Kind.FINISH_RECV_FORWARD, index))
        if self.builder.comes(index + 1):
            self.add(self.act(Kind.START_RECV_FORWARD, index + 1))

    def between(self, index: int, backward: int) -> None:
        if self.builder.comes(index):
            self.add(self.act(Kind.START_SEND_FORWARD, index))
        self.add(self.act(Kind.FINISH_RECV_BACKWARD, backward))
        if self.builder.comes(backward + 1):
            self.add(self.act(Kind.START_RECV_BACKWARD, backward + 1))

    def after_backward(self, index: int, backward: int) -> None:
        self.add(self.act(Kind.START_SEND_BACKWARD, backward))
