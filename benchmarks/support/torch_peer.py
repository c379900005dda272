"""The zero-bubble schedules of torch.distributed.pipelining, on the same clock as the others.

They are synchronous: each iteration fills the pipeline, drains it and ends with Megatron's step
(the norm over all stages, the optimizer, the flag of success). A backward is split into halves for
the input and for the weights, which take half of t_b each, and every rank has two stages, which
take half of everything. With t_b = 2 t_f all three parts are equally long, which is what the
schedules are made for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.jobs import Measurement, run_job, train_iters
from support.pace import Pace

__all__ = ["MODES", "TorchMode", "simulate_lists"]

_SCRIPT = Path(__file__).with_name("torch_pipelining.py")
_CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class TorchMode:
    """A schedule. The rest is that of :class:`support.pace.Paced`.

    Attributes:
        title: in tables and pictures.
        schedule: the name of its class.
        v_shaped: whether a rank's second stages go back through the ranks, so that the first rank
            has the model's two ends.
    """

    title: str
    schedule: str
    v_shaped: bool
    update: bool = True
    hides_update: bool = False

    def impossible(self, pace: Pace) -> str | None:
        if pace.stages < 2:
            return "it needs at least 2 stages"
        try:
            self.lists(pace)
        except ValueError as error:
            return str(error)
        return None

    def lists(self, pace: Pace) -> list[list[Any]]:
        """Return each rank's actions, with what it sends and receives.

        Raises:
            ValueError: the schedule does not take this number of microbatches.
        """
        from torch.distributed.pipelining import _schedule_visualizer, schedules

        return _schedule_visualizer.get_schedule_ops(
            getattr(schedules, self.schedule),
            pace.stages,
            pace.microbatches,
            num_stages_per_rank=_CHUNKS,
            with_comms=True,
        )

    def run(self, pace: Pace) -> Measurement:
        return run_job(
            ranks=pace.stages,
            flags=[],
            iterations=pace.iterations,
            timeout=pace.timeout,
            script=_SCRIPT,
            launched=False,
            settings={
                "schedule": self.schedule,
                "v_shaped": self.v_shaped,
                "microbatches": pace.microbatches,
                "iterations": train_iters(pace.iterations),
                "forward_seconds": pace.forward_ms / 1e3 / _CHUNKS,
                "backward_seconds": pace.backward_ms / 1e3 / _CHUNKS,
                "optimizer_seconds": pace.optimizer_ms / 1e3,
                "latency_seconds": pace.latency_ms / 1e3,
                "tied": pace.tied,
            },
        )

    def simulated_ms(self, pace: Pace) -> float:
        iteration = simulate_lists(
            self.lists(pace),
            forward=pace.forward_ms / _CHUNKS,
            backward=pace.backward_ms / _CHUNKS,
            latency=pace.latency_ms,
        )
        # The norm's message, the step and the flag's; before that the embedding's, if it is shared.
        messages = 3 if pace.tied and not self.v_shaped else 2
        return iteration + messages * pace.latency_ms + pace.optimizer_ms

    def mean_delay(self, pace: Pace) -> float:
        return 0.0


def simulate_lists(
    lists: Sequence[Sequence[Any]], *, forward: float, backward: float, latency: float
) -> float:
    """Run the lists of all ranks from time 0 and return when the last rank is done.

    By the rules of :mod:`megatron_async.schedules.simulator`: what is sent arrives ``latency``
    after it was sent and its receive posted, and until the end nobody waits for a send.

    Args:
        lists: ``lists[r]`` is rank r's, of torch's actions with communication.
        forward: a stage's time for a microbatch.
        backward: likewise; a half for the input and one for the weights take half of it each.
        latency: of a message.

    Raises:
        ValueError: the ranks wait for each other.
    """
    from torch.distributed.pipelining.schedules import _ComputationType as Type

    takes = {
        Type.FORWARD: forward,
        Type.FULL_BACKWARD: backward,
        Type.BACKWARD_INPUT: backward / 2,
        Type.BACKWARD_WEIGHT: backward / 2,
    }
    needs = {
        Type.FORWARD: Type.RECV_F,
        Type.FULL_BACKWARD: Type.RECV_B,
        Type.BACKWARD_INPUT: Type.RECV_B,
    }
    # A message by what receives it: (kind of receive, stage, microbatch).
    towards = {Type.SEND_F: (Type.RECV_F, 1), Type.SEND_B: (Type.RECV_B, -1)}
    sent: dict[tuple[Any, int, int], float] = {}
    posted: dict[tuple[Any, int, int], float] = {}
    received = {
        (action.computation_type, action.stage_index, action.microbatch_index)
        for actions in lists
        for action in actions
        if action.computation_type in (Type.RECV_F, Type.RECV_B)
    }
    clock = [0.0] * len(lists)
    at = [0] * len(lists)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                kind, stage = action.computation_type, action.stage_index
                if kind in towards:
                    receive, step = towards[kind]
                    sent[receive, stage + step, action.microbatch_index] = clock[rank]
                elif kind in (Type.RECV_F, Type.RECV_B):
                    posted[kind, stage, action.microbatch_index] = clock[rank]
                message = (needs.get(kind), stage, action.microbatch_index)
                if message in received:
                    if message not in sent:
                        break
                    arrives = max(sent[message], posted[message]) + latency
                    clock[rank] = max(clock[rank], arrives)
                clock[rank] += takes.get(kind, 0.0)
                at[rank] += 1
                moved = True
    if any(at[rank] < len(actions) for rank, actions in enumerate(lists)):
        raise ValueError("the ranks wait for each other")
    return max(clock)


MODES = {
    "torch-zbv": TorchMode(title="torch ZBV", schedule="ScheduleZBVZeroBubble", v_shaped=True),
    "torch-zb": TorchMode(
        title="torch interleaved zero bubble",
        schedule="ScheduleInterleavedZeroBubble",
        v_shaped=False,
    ),
}
