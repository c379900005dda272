"""The schedules that can be planned and drawn: each registered one, and those that defer their
updates once more without that."""

from dataclasses import dataclass

from megatron_async.schedules import SCHEDULES, Schedule
from megatron_async.schedules.actions import Action
from megatron_async.schedules.schedule import Pipeline, action_lists, settled_calls

__all__ = ["Candidate", "candidate", "candidates"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One of them.

    Attributes:
        name: on the command line.
        title: in tables and pictures.
        schedule: the schedule.
        deferred: whether its updates are deferred.
    """

    name: str
    title: str
    schedule: Schedule
    deferred: bool

    def pipeline(
        self,
        *,
        stages: int,
        chunks: int = 2,
        gather_ahead: bool = False,
        reduce_late: bool = False,
    ) -> Pipeline:
        """Return what its lists are made for; what the schedule does not have is left out."""
        return Pipeline(
            stages=stages,
            deferred=self.deferred,
            gather_ahead=gather_ahead,
            reduce_late=reduce_late and self.deferred,
            chunks=chunks if self.schedule.interleaved else 1,
        )

    def lists(
        self, pipeline: Pipeline, *, microbatches: int, iterations: int | None = None
    ) -> list[list[Action]]:
        """Return all stages' action lists, from the filling of the pipeline to its draining.

        Args:
            pipeline: see :meth:`pipeline`.
            microbatches: of each batch.
            iterations: how many; by default as many as have a steady state amid them.

        Raises:
            ValueError: it cannot run with these numbers; the message says why.
        """
        if problems := self.schedule.problems(pipeline, microbatches):
            raise ValueError("; ".join(problem.message for problem in problems))
        if iterations is None:
            iterations = settled_calls(self.schedule, pipeline, microbatches)
        return action_lists(self.schedule, pipeline, [microbatches] * iterations)


def candidates() -> list[Candidate]:
    """Return all of them, in the order of registration."""
    found: list[Candidate] = []
    for schedule in SCHEDULES:
        if schedule.deferrable and not schedule.problems(Pipeline(stages=1, deferred=False), 1):
            found.append(
                Candidate(
                    name=f"{schedule.name}-undeferred",
                    title=f"{schedule.title}, update at the end of the iteration",
                    schedule=schedule,
                    deferred=False,
                )
            )
        title = f"{schedule.title}, deferred update" if schedule.deferrable else schedule.title
        found.append(
            Candidate(
                name=schedule.name,
                title=title,
                schedule=schedule,
                deferred=schedule.deferrable,
            )
        )
    return found


def candidate(name: str) -> Candidate:
    """Return one by name.

    Raises:
        ValueError: there is none of that name.
    """
    known = {each.name: each for each in candidates()}
    if name not in known:
        raise ValueError(f"no schedule is named {name!r}; there are: {', '.join(known)}")
    return known[name]
