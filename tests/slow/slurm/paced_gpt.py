"""The training script of the Slurm tests: examples/pretrain_gpt.py, written down and slowed down.

``LOSSES`` names a file for a line of each iteration: attempt, iteration, loss with all its digits.
An iteration takes ``PACE`` seconds more, so that there is time to interrupt the job; the losses do
not depend on that. ``FAIL_AT`` names an iteration that fails, in every attempt.
"""

import os
import time

from megatron.training import get_args, training

from megatron_async.scripts.pretrain_gpt import main

_ATTEMPT = os.environ.get("SLURM_RESTART_COUNT", "0")
_FAIL_AT = int(os.environ.get("FAIL_AT", "0"))
_IS_LAST = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
_LOSSES = os.open(os.environ["LOSSES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
_train_step = training.train_step


def _recorded(*args: object, **kwargs: object) -> object:
    iteration = get_args().curr_iteration + 1
    if iteration == _FAIL_AT:
        raise RuntimeError(f"iteration {iteration} fails, as the test wants it")
    result = _train_step(*args, **kwargs)
    time.sleep(float(os.environ.get("PACE", "0")))
    if _IS_LAST and "lm loss" in result[0]:
        # At once: a killed process writes nothing at its end.
        line = f"{_ATTEMPT} {iteration} {float(result[0]['lm loss'])!r}\n"
        os.write(_LOSSES, line.encode())
    return result


training.train_step = _recorded

if __name__ == "__main__":
    main()
