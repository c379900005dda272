"""Runs the launcher with stages that are late: jitter, one stage twice as slow, one pause.

Run by torchrun in place of ``-m megatron_async``. JITTER_MS is the mean delay of a forward or
backward; 0 delays nothing. Stage 1 is delayed twice as long, and stage 2 stops for a second in
iterations 5 and 20. At its end each rank says how often and how long it was delayed.
"""

import atexit
import os
import random
import sys
import time
from typing import Any


def delay_stages(mean: float) -> None:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import get_args

    draw = random.Random(1000 + int(os.environ["RANK"]))
    paused: set[int] = set()
    delays: list[float] = []
    atexit.register(lambda: print(f"delayed {len(delays)} times, {sum(delays):.2f} s", flush=True))

    def sleep(seconds: float) -> None:
        delays.append(seconds)
        time.sleep(seconds)

    def late(original: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            stage = parallel_state.get_pipeline_model_parallel_rank()
            iteration = get_args().curr_iteration
            if stage == 2 and iteration in (5, 20) and iteration not in paused:
                paused.add(iteration)
                sleep(1.0)
            sleep(draw.expovariate(1.0 / mean) * (2 if stage == 1 else 1))
            return original(*args, **kwargs)

        return step

    schedules.forward_step = late(schedules.forward_step)
    schedules.backward_step = late(schedules.backward_step)


def main() -> None:
    from megatron_async import hooks
    from megatron_async.__main__ import main as launch

    mean = float(os.environ["JITTER_MS"]) / 1e3
    install = hooks.install

    def install_and_delay() -> None:
        install()
        if mean > 0:
            delay_stages(mean)

    hooks.install = install_and_delay
    launch(sys.argv[1:])


main()
