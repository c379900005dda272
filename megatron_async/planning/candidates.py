"""The schedules that can be planned and drawn: each registered one, and those that defer their
updates once more without that."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_async.registry import Flag
from megatron_async.schedules import SCHEDULES, Schedule
from megatron_async.schedules.actions import Action
from megatron_async.schedules.schedule import Pipeline, action_lists, settled_calls

__all__ = [
    "Candidate",
    "add_schedule_flags",
    "candidate",
    "candidates",
    "check_counts",
    "pipeline_of",
]

_MOST = 2**17
"""Stages times microbatches above which a simulation takes minutes."""


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
        extra_warmup: int = 0,
        flags: Mapping[str, Any] | None = None,
    ) -> Pipeline:
        """Return what its lists are made for; what the schedule does not have is left out.

        Args:
            stages: p.
            chunks: on each stage, of interleaved schedules.
            gather_ahead: parameters are gathered under computation.
            reduce_late: with a second gradient buffer.
            extra_warmup: of ``--pipeline-extra-warmup``.
            flags: values of schedules' flags, by their ``dest``.
        """
        own = {flag.dest for flag in self.schedule.flags}
        return Pipeline(
            stages=stages,
            deferred=self.deferred,
            gather_ahead=gather_ahead,
            reduce_late=reduce_late and self.deferred,
            chunks=chunks if self.schedule.interleaved else 1,
            extra_warmup=extra_warmup if self.schedule.extra_warmup else 0,
            flags={dest: value for dest, value in (flags or {}).items() if dest in own},
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


def _schedule_flags() -> list[Flag]:
    """Those of schedules that defer their updates; what an emulation takes is nothing to plan."""
    found = {flag.dest: flag for each in SCHEDULES if each.deferrable for flag in each.flags}
    return list(found.values())


def add_schedule_flags(parser: Any) -> None:
    """Add the flags of a run that its action lists depend on, by the same names."""
    parser.add_argument(
        "--pipeline-extra-warmup", type=int, default=0, metavar="E", help="as in training"
    )
    for flag in _schedule_flags():
        flag.add_to(parser)


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raise a ValueError that names the first of these flags whose number is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}")


def pipeline_of(candidate: Candidate, args: argparse.Namespace) -> Pipeline:
    """Return the pipeline of a candidate that a command's flags describe.

    Raises:
        ValueError: a number that no schedule can run with.
    """
    check_counts(args, "stages", "microbatches")
    if args.stages * args.microbatches > _MOST:
        raise ValueError(
            f"{args.stages} stages times {args.microbatches} microbatches are too many to "
            f"simulate: at most {_MOST}"
        )
    most = max(args.stages - 1, 0)
    if not 0 <= args.pipeline_extra_warmup <= most:
        raise ValueError(
            f"--pipeline-extra-warmup is from 0 to {most} with {args.stages} stages, got "
            f"{args.pipeline_extra_warmup}"
        )
    return candidate.pipeline(
        stages=args.stages,
        chunks=args.chunks,
        gather_ahead=args.overlap_param_gather,
        reduce_late=args.second_grad_buffer,
        extra_warmup=args.pipeline_extra_warmup,
        flags={flag.dest: getattr(args, flag.dest) for flag in _schedule_flags()},
    )


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
