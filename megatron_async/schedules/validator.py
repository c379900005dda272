"""Check action lists: are they a correct schedule?

What is checked is order and data, not time: whether stages can wait for each other in a circle, and
what waiting costs, is the simulator's to find.
"""

from collections import defaultdict
from collections.abc import Sequence

from megatron_async.schedules.actions import (
    COMPUTE,
    FINISHED_RECEIVES,
    GATHERS,
    REDUCTIONS,
    UNWAITED_SENDS,
    UPDATES,
    Action,
    Kind,
    Transfer,
)
from megatron_async.schedules.schedule import Pipeline, Schedule, VersionRule

__all__ = ["ScheduleError", "validate"]

type _Microbatch = tuple[int, int, int]  # batch, microbatch, chunk


class ScheduleError(Exception):
    """A list of actions that would train wrongly or not at all.

    Attributes:
        stage: The stage whose list is wrong.
        position: The action's index in that list, None if the fault is no single action's.
        action: The action, None likewise.
        reason: What is wrong with it.
    """

    def __init__(
        self, stage: int, reason: str, position: int | None = None, action: Action | None = None
    ) -> None:
        where = f"stage {stage}"
        if action is not None:
            where += f", action {position}: {action}"
        super().__init__(f"{where}: {reason}")
        self.stage = stage
        self.position = position
        self.action = action
        self.reason = reason


def validate(
    lists: Sequence[Sequence[Action]],
    *,
    schedule: Schedule,
    pipeline: Pipeline,
    microbatches: Sequence[int],
    start: int = 0,
) -> None:
    """Check the lists of all stages, one list a stage, over any number of calls.

    On each stage: every microbatch is forwarded once and then has its backward once, on the weight
    versions of the schedule's rule, which exist there, with its input or output gradient received
    before; gradients are reduced once they are there, and no other batch's are added to them until
    the update has taken them; an update has the reduced gradients of the whole batch, comes in
    order, and overwrites no version that a microbatch in flight still needs (version v lies in
    buffer v mod kept); at most one update is launched and not completed; a gathered version is not
    used before its gather is finished; no more microbatches are in flight than the stage may run
    ahead, and one; the lists end with the pipeline drained on all stages, or with as many
    microbatches in flight on each as it runs ahead.
    Between stages: what one sends is what the other receives, in the same order.

    Args:
        lists: `lists[s]` is stage s's list, from a first call (empty pipeline) on.
        schedule: whose lists they are to be.
        pipeline: what they were made for.
        microbatches: m of each call's batch; batches behind the last one have as many as it.
        start: the batch of the first call.

    Raises:
        ScheduleError: Names the stage, the action and the reason, for the first fault found.
        ValueError: Not one list a stage.
    """
    if len(lists) != pipeline.stages or not lists:
        raise ValueError(f"there are {pipeline.stages} stages and {len(lists)} lists")
    chunks = 1 + max((action.chunk for actions in lists for action in actions), default=0)
    stages = [
        _Stage(stage, schedule, pipeline, chunks=chunks, microbatches=microbatches, start=start)
        for stage in range(len(lists))
    ]
    for stage, actions in zip(stages, lists, strict=True):
        for position, action in enumerate(actions):
            stage.take(position, action)
    drained = _check_ends(stages)
    _check_transfers(lists, chunks, drained=drained)


class _Stage:
    """What one stage holds while its list is walked through."""

    def __init__(
        self,
        stage: int,
        schedule: Schedule,
        pipeline: Pipeline,
        *,
        chunks: int,
        microbatches: Sequence[int],
        start: int,
    ) -> None:
        self.stage = stage
        self.stages = pipeline.stages
        self.chunks = chunks
        self.pipeline = pipeline
        self.schedule = schedule
        self.microbatches = microbatches
        self.start = start
        self.kept = self._rule(start).kept(stage)
        self.ahead = schedule.ahead(pipeline, stage, microbatches[0])
        # Of a resumed run the earlier versions too are at hand.
        oldest = max(start - self.kept + 1, 0)
        self.resident = {v % self.kept: v for v in range(oldest, start + 1)}
        self.in_flight: dict[_Microbatch, int] = {}
        """The version that each one's backward needs."""
        self.forwarded: set[_Microbatch] = set()
        self.finished: defaultdict[int, set[_Microbatch]] = defaultdict(set)
        self.arrived: set[Transfer] = set()
        self.sent: set[Transfer] = set()
        self.posted: set[Transfer] = set()
        """Receives that were posted and not waited for."""
        self.reduced = start - 1
        """The last batch whose gradients are reduced."""
        self.reducing: int | None = None
        self.launched: int | None = None
        self.last_launched = start - 1
        self.gathering: set[int] = set()
        self.put_off: set[_Microbatch] = set()
        """Those whose weights' gradients are still to come."""

    def _count(self, batch: int) -> int:
        return self.microbatches[min(batch - self.start, len(self.microbatches) - 1)]

    def _rule(self, batch: int) -> VersionRule:
        return self.schedule.rule(self.pipeline, self._count(batch))

    def _whole(self, batch: int) -> set[_Microbatch]:
        return {
            (batch, i, chunk) for i in range(self._count(batch)) for chunk in range(self.chunks)
        }

    def take(self, position: int, action: Action) -> None:
        reason = self._fault(action)
        if reason:
            raise ScheduleError(self.stage, reason, position, action)

    def _fault(self, action: Action) -> str | None:
        if action.stage != self.stage:
            return f"it belongs to stage {action.stage}"
        if not 0 <= action.chunk < self.chunks:
            return "there is no such model chunk"
        if action.kind is Kind.FORWARD:
            return self._forward(action)
        if action.kind is Kind.BACKWARD:
            return self._backward(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            return self._backward_weight(action)
        if action.kind in REDUCTIONS:
            return self._reduce(action)
        if action.kind in UPDATES:
            return self._update(action)
        if action.kind in GATHERS:
            return self._gather(action)
        return self._communicate(action)

    def _border(self, action: Action, *, forward: bool) -> Transfer | None:
        """The tensor that the computation `action` needs from another stage."""
        assert action.kind in COMPUTE
        needs = Action(
            stage=self.stage,
            kind=Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD,
            batch=action.batch,
            microbatch=action.microbatch,
            chunk=action.chunk,
        )
        return needs.received(stages=self.stages, chunks=self.chunks)

    def _version_fault(self, action: Action) -> str | None:
        rule = self._rule(action.batch)
        uses = rule.forward if action.kind is Kind.FORWARD else rule.backward
        wanted = uses(action.batch, action.microbatch, self.stage)
        if action.version != wanted:
            return (
                f"microbatch {action.microbatch} of batch {action.batch} must run "
                f"{action.kind.value} on version {wanted}"
            )
        if self.resident.get(action.version % self.kept) != action.version:
            held = sorted(self.resident.values())
            return f"version {action.version} does not exist here now, only {held}"
        if action.version in self.gathering:
            return f"the gather of version {action.version} is not finished"
        return None

    def _forward(self, action: Action) -> str | None:
        key = (action.batch, action.microbatch, action.chunk)
        if key in self.forwarded:
            return "it is forwarded a second time"
        if key not in self._whole(action.batch):
            return "there is no such microbatch"
        needed = self._border(action, forward=True)
        if needed is not None and needed not in self.arrived:
            return "its input was not received before"
        fault = self._version_fault(action)
        if fault:
            return fault
        self.forwarded.add(key)
        self.in_flight[key] = self._rule(action.batch).backward(
            action.batch, action.microbatch, self.stage
        )
        if len(self.in_flight) > self.ahead + 1:
            return f"{len(self.in_flight)} microbatches are in flight, at most {self.ahead + 1} may"
        return None

    def _backward(self, action: Action) -> str | None:
        key = (action.batch, action.microbatch, action.chunk)
        if key not in self.in_flight:
            done = key in self.finished[action.batch]
            return "its backward ran before" if done else "it was not forwarded before"
        needed = self._border(action, forward=False)
        if needed is not None and needed not in self.arrived:
            return "its output gradient was not received before"
        fault = self._version_fault(action)
        if fault:
            return fault
        if action.batch <= self.last_launched:
            return f"the update of batch {action.batch} was launched before"
        held = action.batch - 1 - self.last_launched
        if held > (1 if self.pipeline.reduce_late else 0):
            return (
                f"the gradients of batch {self.last_launched + 1} are in the buffer that it adds to"
            )
        last = self._whole(action.batch) - self.finished[action.batch] == {key}
        if last and self.reducing != action.batch:
            return f"the reduction of batch {action.batch} was not started before its last backward"
        del self.in_flight[key]
        self.finished[action.batch].add(key)
        if self.schedule.split_backward:
            self.put_off.add(key)
        return None

    def _backward_weight(self, action: Action) -> str | None:
        key = (action.batch, action.microbatch, action.chunk)
        if key not in self.put_off:
            return "its backward was not run before, or was whole"
        self.put_off.discard(key)
        return self._version_fault(action)

    def _reduce(self, action: Action) -> str | None:
        missing = self._whole(action.batch) - self.finished[action.batch]
        if action.kind is Kind.START_REDUCTION:
            if self.reducing is not None and not self.pipeline.reduce_late:
                return f"the reduction of batch {self.reducing} is not finished"
            if len(missing) != 1:
                return f"{len(missing)} of the batch's backwards are still to come, not the last"
            self.reducing = action.batch
            return None
        if missing:
            return f"{len(missing)} of the batch's backwards are still to come"
        if left := sum(batch == action.batch for batch, *_ in self.put_off):
            return f"the weights' gradients of {left} microbatches are still to come"
        if action.batch != self.reduced + 1:
            return f"the next reduction is that of batch {self.reduced + 1}"
        self.reduced = action.batch
        if self.reducing == action.batch:
            self.reducing = None
        return None

    def _update(self, action: Action) -> str | None:
        if action.version != action.batch + 1:
            return f"batch {action.batch} makes version {action.batch + 1}"
        if action.kind is not Kind.LAUNCH_UPDATE:
            lost = self.resident.get(action.version % self.kept)
            users = sum(version == lost for version in self.in_flight.values())
            if users:
                return f"version {lost} is overwritten while {users} microbatches in flight need it"
            if self.gathering:
                return f"the gather of version {min(self.gathering)} is not finished"
        if action.kind is not Kind.COMPLETE_UPDATE:
            if action.batch != self.last_launched + 1:
                return f"the next update is that of batch {self.last_launched + 1}"
            if self.launched is not None:
                return f"the update of batch {self.launched} was launched and is not completed"
            if action.batch > self.reduced:
                return f"the gradients of batch {action.batch} are not reduced"
            self.last_launched = self.launched = action.batch
        if action.kind is not Kind.LAUNCH_UPDATE:
            if self.launched != action.batch:
                return f"the update of batch {action.batch} was not launched"
            self.launched = None
            self.resident[action.version % self.kept] = action.version
        return None

    def _gather(self, action: Action) -> str | None:
        if self.resident.get(action.version % self.kept) != action.version:
            return f"version {action.version} was not made"
        if action.kind is Kind.START_GATHER:
            if action.version in self.gathering:
                return "it is gathered a second time"
            self.gathering.add(action.version)
        elif action.version not in self.gathering:
            return f"the gather of version {action.version} was not started"
        else:
            self.gathering.discard(action.version)
        return None

    def _communicate(self, action: Action) -> str | None:
        sent = action.sent(stages=self.stages, chunks=self.chunks)
        if sent is not None:
            key = (action.batch, action.microbatch, action.chunk)
            made = key in self.forwarded if sent.forward else key in self.finished[action.batch]
            if not made:
                return "what it sends was not computed before"
            if sent in self.sent:
                return "it is sent a second time"
            self.sent.add(sent)
        posted = action.posted(stages=self.stages)
        if posted is not None:
            if posted in self.posted or posted in self.arrived:
                return "its receive is posted a second time"
            self.posted.add(posted)
        received = action.received(stages=self.stages, chunks=self.chunks)
        if received is not None:
            if received in self.arrived:
                return "it is received a second time"
            if action.kind in FINISHED_RECEIVES:
                if received not in self.posted:
                    return "its receive was not posted"
                self.posted.discard(received)
            self.arrived.add(received)
        return None


def _check_ends(stages: Sequence[_Stage]) -> bool:
    """Whether the pipeline is drained."""
    drained = all(not stage.in_flight for stage in stages)
    for stage in stages:
        left = len(stage.in_flight)
        if not drained and left != stage.ahead:
            raise ScheduleError(
                stage.stage,
                f"the lists end with {left} microbatches in flight here, not {stage.ahead} as "
                "between two calls, and not 0 on every stage as after the last",
            )
        if drained and stage.posted:
            raise ScheduleError(
                stage.stage, f"the lists end with a receive that is posted: {min(stage.posted)}"
            )
        # One stage alone never has microbatches in flight between calls, so there this is no end.
        if drained and len(stages) > 1 and stage.launched is not None:
            raise ScheduleError(
                stage.stage, f"the lists end with the update of batch {stage.launched} incomplete"
            )
        if stage.last_launched != stages[0].last_launched:
            raise ScheduleError(
                stage.stage,
                f"its last update is that of batch {stage.last_launched}, stage 0's is that of "
                f"batch {stages[0].last_launched}",
            )
    return drained


def _check_transfers(lists: Sequence[Sequence[Action]], chunks: int, *, drained: bool) -> None:
    """On every channel (direction, sender, receiver) both ends name the same tensors in order.

    What nobody waits for may still be on its way where the pipeline is not drained.
    """
    stages = len(lists)
    channel = tuple[bool, int, int]
    sent: defaultdict[channel, list[tuple[Transfer, int]]] = defaultdict(list)
    received: defaultdict[channel, list[tuple[Transfer, int]]] = defaultdict(list)
    for actions in lists:
        for position, action in enumerate(actions):
            for transfer, ends in (
                (action.sent(stages=stages, chunks=chunks), sent),
                (action.received(stages=stages, chunks=chunks), received),
            ):
                if transfer is not None:
                    key = (transfer.forward, transfer.sender(stages), transfer.receiver(stages))
                    ends[key].append((transfer, position))
    for key in sorted(sent.keys() | received.keys()):
        _, sender, receiver = key
        for index in range(max(len(sent[key]), len(received[key]))):
            if index >= len(sent[key]):
                _, position = received[key][index]
                raise ScheduleError(
                    receiver,
                    f"stage {sender} never sends what it receives",
                    position,
                    lists[receiver][position],
                )
            out, position = sent[key][index]
            action = lists[sender][position]
            if index >= len(received[key]):
                if not drained and action.kind in UNWAITED_SENDS:
                    break
                raise ScheduleError(
                    sender, f"stage {receiver} never receives what it sends", position, action
                )
            into, other = received[key][index]
            if out != into:
                raise ScheduleError(
                    sender,
                    f"stage {receiver} expects something else at that place, in its action "
                    f"{other}: {lists[receiver][other]}",
                    position,
                    action,
                )
