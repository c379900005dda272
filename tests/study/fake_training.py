"""Stands in for a training run in tests of what surrounds it: prints lines as Megatron does.

    python fake_training.py -m megatron_async [--cpu] SCRIPT FLAGS

``--fake`` says what happens: ``train`` (the default), ``fail``, ``diverge``, ``hang`` after half of
the iterations. The loss is made of learning rate, delay, correction and seed. The file ``start`` in
the folder of ``--load`` has the number of iterations that are done already.
"""

import sys
import time
from pathlib import Path


def flag(name: str, default: str = "") -> str:
    argv = sys.argv
    return argv[argv.index(f"--{name}") + 1] if f"--{name}" in argv else default


def main() -> None:
    iterations, rate, seed = int(flag("train-iters")), float(flag("lr")), int(flag("seed"))
    what = flag("fake", "train")
    # Best at 0.01; the delay costs 0.5, the correction wins back 0.2.
    loss = 2.0 + 50 * abs(rate - 0.01) + 0.01 * seed
    loss += 0.5 * (flag("pipeline-schedule") != "") - 0.2 * (flag("delay-correction") != "")
    checkpoint = Path(flag("load", "nowhere")) / "start"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for number in range(done + 1, iterations + 1):
        if number > iterations // 2:
            if what == "fail":
                raise ValueError("the tensors do not fit")
            if what == "diverge":
                raise RuntimeError(
                    "Unexpected result nan (message='found NaN in local forward loss')"
                )
            if what == "hang":
                time.sleep(600)
        now = loss + 1.0 / number
        if number == done + 2:  # Megatron's mean of the first two
            now = (now + loss + 1.0 / (number - 1)) / 2
        print(
            f" [2026-01-02 03:04:05] iteration {number:8d}/{iterations:8d} | consumed samples: 1 | "
            f"elapsed time per iteration (ms): 100.0 | lm loss: {now:.6E} | grad norm: 1.0 |",
            flush=True,
        )
    place = f"iteration {iterations} on validation set"
    print(
        f" validation loss at {place} | lm loss value: {loss:.6E} | lm loss PPL: 9.0 | ", flush=True
    )


main()
