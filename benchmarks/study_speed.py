"""Steps a second of the tiny model that studies train, as it is and on the fast path.

Both models are trained by the same small study, one cell at a time, in turn; a step's time is the
median over the steps behind the tenth. One thread computes, so that on an idle machine this is the
core's time.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.options import add_common
from support.report import Spread, print_table, progress, write_bars, write_csv

import megatron_async.study
from megatron_async.tools.training_log import TrainingLog

CONFIGS = Path(megatron_async.study.__file__).parent / "configs"

MODELS = {"slow": ("models/small.yaml", 2), "fast": ("models/small-fast.yaml", 1)}
"""Of each: its file, and half of a batch's microbatches: 4 of 4 sequences, or 2 of 8 with torch's
fused operators."""

RATES = {"adam": 8e-3, "muon": 1e-2, "soap": 8e-3}
OTHERS = ("mars", "adan", "lion", "normuon")

CONFIG = """\
base: [{model}, {optimizers}]
flags: {{train-iters: {steps}, eval-iters: 1}}
optimizers: {{{chosen}}}
delays:
  - none
  - {{name: half, flags: {{pipeline-schedule: fresh-2bw, delayed-microbatches: {half}}}}}
  - one-step
corrections: [none, error-feedback]
seeds: [1]
"""

_FIRST = 10  # steps that allocate, and load what they need


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", choices=RATES, default=["adam", "muon"])
    add_common(parser, iterations=100, repeats=3)
    args = parser.parse_args()
    if args.quick:
        args.optimizers, args.iterations, args.repeats = ["adam"], 10, 1
    times: dict[tuple[str, str, str], list[float]] = {}
    for repeat, model in itertools.product(range(args.repeats), MODELS):
        progress(f"{model}, {repeat + 1} of {args.repeats} ...")
        try:
            for optimizer, mode, seconds in _study(model, args):
                times.setdefault((optimizer, mode, model), []).append(seconds)
        except subprocess.CalledProcessError as error:
            progress(f"{error}\n{error.stderr}")
            return 1
    rows: list[dict[str, Any]] = []
    for optimizer, mode, model in sorted(times):
        seconds, slow = (statistics.median(times[optimizer, mode, of]) for of in (model, "slow"))
        rows.append(
            {
                "optimizer": optimizer,
                "mode": mode,
                "model": model,
                "seconds_per_step": seconds,
                "steps_per_s": 1 / seconds,
                "baseline": "slow",
                "ratio": slow / seconds,
            }
        )
    table = [["optimizer", "mode", "model", "ms a step", "steps a second", "times as fast"]]
    for row in rows:
        table.append(
            [
                *(row["optimizer"], row["mode"], row["model"]),
                f"{1e3 * row['seconds_per_step']:.1f}",
                f"{row['steps_per_s']:.1f}",
                f"{row['ratio']:.2f}",
            ]
        )
    print_table(table)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        bars = [
            (", ".join(key), Spread.of([1 / seconds for seconds in found]))
            for key, found in sorted(times.items())
        ]
        write_bars(args.png, title="The tiny model of studies", unit="steps a second", bars=bars)
    return 0


def _study(model: str, args: argparse.Namespace) -> Iterator[tuple[str, str, float]]:
    """Train all cells; of each the optimizer, the mode, and the seconds of a step."""
    file, half = MODELS[model]
    unused = [*OTHERS, *(name for name in RATES if name not in args.optimizers)]
    chosen = [f"{name}: null" for name in unused]
    chosen += [f"{name}: {{learning-rates: [{RATES[name]}]}}" for name in args.optimizers]
    with tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "speed.yaml"
        config.write_text(
            CONFIG.format(
                model=CONFIGS / file,
                optimizers=CONFIGS / "models/optimizers.yaml",
                steps=_FIRST + args.iterations,
                chosen=", ".join(chosen),
                half=half,
            ),
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "megatron_async.tools.cli", "study", str(config)]
        subprocess.run(
            [*command, "--jobs", "1", "--output", directory],
            check=True,
            timeout=args.timeout,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for result in sorted(Path(directory).glob("cells/*/result.json")):
            settings = json.loads(result.read_text(encoding="utf-8"))["settings"]
            log = TrainingLog()
            for line in result.with_name("log.txt").read_text(encoding="utf-8").splitlines():
                log.feed(line)
            corrected = settings["correction"] != "none"
            yield (
                settings["optimizer"],
                ("synchronous" if settings["delay"] == "none" else settings["delay"])
                + (", corrected" if corrected else ""),
                statistics.median(step.seconds for step in log.iterations[_FIRST:]),
            )


if __name__ == "__main__":
    sys.exit(main())
