"""What a rank measures, and how a function is made to take a given time."""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Record", "stretched"]


@dataclasses.dataclass
class Record:
    """What one rank measured; seconds of the machine-wide monotonic clock."""

    ends: list[float] = dataclasses.field(default_factory=list)
    """When each iteration ended."""
    forward: list[float] = dataclasses.field(default_factory=list)
    """How long each forward took, without the added sleep."""
    backward: list[float] = dataclasses.field(default_factory=list)
    optimizer: list[float] = dataclasses.field(default_factory=list)
    step: list[float] = dataclasses.field(default_factory=list)
    """How long each of Megatron's ``optimizer.step()`` took: norm, clipping, the optimizer, and
    waiting for the other ranks. Empty where a schedule puts its own in that place."""
    collectives: int = 0
    """Data-parallel collectives that were delayed."""
    tensor_bytes: int = 0
    """Of all tensors alive at the end, each storage counted once."""
    saved_bytes: int = 0
    """That autograd keeps for backwards at the peak, without weights."""
    peak_bytes: int = 0
    """The device allocator's peak, or the process's peak resident size on a CPU rank."""

    def write(self, output: str, *, rank: int) -> None:
        """Write it to ``rank<N>.json`` in a folder."""
        path = Path(output) / f"rank{rank}.json"
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")


def stretched(
    original: Callable[..., Any],
    seconds: float | None,
    times: list[float],
    *,
    sleep_first: bool = False,
) -> Any:
    """The function, timed, and made to take at least some seconds.

    Args:
        original: the function.
        seconds: what it takes from now on; None: what it takes.
        times: gets the time of each call without the sleep.
        sleep_first: sleep ahead of it as long as the last call left, and only the rest behind it.
    """

    @functools.wraps(original)
    def timed(*args: Any, **kwargs: Any) -> Any:
        end = None if seconds is None else time.monotonic() + seconds
        if seconds is not None and sleep_first and times:
            time.sleep(max(seconds - times[-1], 0.0))
        start = time.monotonic()
        result = original(*args, **kwargs)
        times.append(time.monotonic() - start)
        if end is not None:
            time.sleep(max(end - time.monotonic(), 0.0))
        return result

    return timed
