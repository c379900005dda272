"""The run of this process: what its parts have to find, in one object.

One process trains one model, and Megatron calls the hooks from many places that cannot pass a thing
on. What they share is here and nowhere else, and :meth:`Run.reset` forgets it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_async.runtime.counters.bubble import BubbleLog
    from megatron_async.runtime.engine import Engine
    from megatron_async.runtime.fingerprints import Fingerprints

__all__ = ["Run", "run"]


class Run:
    """What the hooks of one process share."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as at the start of a process."""
        self.engine: Engine | None = None
        """The engine; None before the optimizer is built, or with Megatron's own schedule."""
        self.bubble: BubbleLog | None = None
        """The measurement of ``--log-pipeline-bubble``; None if it is off."""
        self.fingerprints: Fingerprints | None = None
        """What ``--log-fingerprints`` writes; None without it."""
        self.checkpoint: Any = None
        """The save or load that is under way."""
        self.chosen_checkpoint: tuple[Path, int] | None = None
        """With ``--ckpt-step``, the tracker file that it stands in for, and the iteration."""
        self.last_save: tuple[str, int] | None = None
        """Directory and iteration of the last save that began."""
        self.given_flags: dict[str, Any] = {}
        """Of each of Megatron's flags that is replaced now, the value on the command line."""

    @property
    def deferring(self) -> bool:
        """Whether the running iteration's update is deferred, so that nothing may wait for a
        stage."""
        return self.engine is not None and self.engine.deferring

    def waiting(self) -> AbstractContextManager[None]:
        """Count the body as waiting for another stage, if the bubble is measured."""
        return nullcontext() if self.bubble is None else self.bubble.meter.waiting()

    def paused(self) -> AbstractContextManager[None]:
        """Leave the body out of the iteration, if the bubble is measured."""
        return nullcontext() if self.bubble is None else self.bubble.meter.paused()


run = Run()
"""That of this process."""
