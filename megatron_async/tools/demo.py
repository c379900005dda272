"""``megatron-async demo``: what asynchronous training costs, on two CPU ranks, in a few minutes.

A byte-level dataset is made of the Python standard library's source files. Then the same small GPT
is trained four times from the same initial weights on the same batches, on two pipeline stages:
synchronously, with PipeDream-2BW without and with the delay correction, and with fresh-2bw and the
correction. Each is a real run of Megatron through the launcher; everything reported is read from
its log.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_async.corrections import RECOMMENDED as CORRECTION
from megatron_async.schedules.fresh_2bw import FRESH_2BW
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.tools import corpora, data, demo_report
from megatron_async.tools.demo_report import Result
from megatron_async.tools.job import Job, JobError
from megatron_async.tools.progress import ProgressBar
from megatron_async.tools.training_log import TrainingLog

__all__ = ["MODES", "Scale", "main", "training_flags"]

MODES: dict[str, tuple[str, tuple[str, ...]]] = {
    "synchronous": ("synchronous 1F1B", ()),
    "2bw": ("PipeDream-2BW", ("--pipeline-schedule", PIPEDREAM_2BW.name)),
    "2bw-corrected": (
        "PipeDream-2BW + correction",
        ("--pipeline-schedule", PIPEDREAM_2BW.name, "--delay-correction", CORRECTION),
    ),
    "fresh-corrected": (
        "fresh-2bw + correction",
        ("--pipeline-schedule", FRESH_2BW.name, "--delay-correction", CORRECTION),
    ),
}
"""By the name of a run's files: its title, and the flags that set it apart."""

_RANKS = 2
_SILENCE_S = 600.0  # a job that logs nothing for so long hangs


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The size of the demo.

    Attributes:
        iterations: optimizer steps of each run.
        hidden_size: of the model, which has 4 layers with 4 heads each.
        sequence: length in bytes.
        batch: sequences a batch, in 4 microbatches.
        learning_rate: the peak, for Muon and for the Adam that trains embeddings and norms.
        validation_batches: batches of the validation at the end.
    """

    iterations: int
    hidden_size: int
    sequence: int
    batch: int
    learning_rate: float
    validation_batches: int


FULL = Scale(
    iterations=100,
    hidden_size=128,
    sequence=64,
    batch=32,
    learning_rate=5e-3,
    validation_batches=20,
)
QUICK = Scale(
    iterations=30, hidden_size=64, sequence=64, batch=32, learning_rate=5e-3, validation_batches=8
)


def training_flags(scale: Scale, *, dataset: Path, cache: Path) -> list[str]:
    """Megatron's flags, the same for all runs.

    Args:
        scale: the size of the demo.
        dataset: path of the .bin and .idx files without their suffix.
        cache: a folder for Megatron's index files.
    """
    flags: dict[str, object] = {
        "num-layers": 4,
        "hidden-size": scale.hidden_size,
        "num-attention-heads": 4,
        "seq-length": scale.sequence,
        "max-position-embeddings": scale.sequence,
        "normalization": "RMSNorm",
        "pipeline-model-parallel-size": _RANKS,
        "micro-batch-size": scale.batch // 4,
        "global-batch-size": scale.batch,
        "train-iters": scale.iterations,
        "optimizer": "muon",
        "muon-momentum": 0.95,
        "muon-extra-scale-factor": 0.2,
        "lr": scale.learning_rate,
        "min-lr": scale.learning_rate / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": scale.iterations // 10,
        "clip-grad": 1.0,
        "weight-decay": 0.1,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "data-path": dataset,
        "data-cache-path": cache,
        "split": "95,5,0",
        "eval-iters": scale.validation_batches,
        "eval-interval": 10 * scale.iterations,  # at the end only
        "log-interval": 1,
        "num-workers": 0,
        "seed": 1234,
    }
    switches = (
        "--muon-nesterov",
        "--untie-embeddings-and-output-weights",
        "--disable-bias-linear",
        "--log-pipeline-bubble",
    )
    pairs = (part for name, value in flags.items() for part in (f"--{name}", str(value)))
    return [*pairs, *data.BYTE_TOKENIZER_FLAGS, *switches]


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit status."""
    args = _make_parser().parse_args(argv)
    output: Path = args.output
    scale = QUICK if args.quick else FULL
    started = time.monotonic()
    try:
        output.mkdir(parents=True, exist_ok=True)
        tokenizer = data.ByteTokenizer()
        prefix = output / "stdlib"
        summary = data.write_dataset(
            corpora.standard_library(),
            prefix,
            tokenizer=tokenizer,
            overwrite=True,
            label=f"{'dataset':<26}",
        )
        print(f"{summary.documents:,} source files, {summary.tokens:,} bytes as tokens")
        flags = training_flags(scale, dataset=prefix, cache=output / "index-cache")
        results = [_train(name, output, flags, scale) for name in MODES]
    except (data.DataError, JobError) as error:
        print(f"megatron-async demo: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = error.filename or output
        print(f"megatron-async demo: {place}: {error.strerror}", file=sys.stderr)
        return 1
    print()
    print(demo_report.table(results))
    files = demo_report.write(results, output)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    print(
        "--quick is too short to compare the losses: run it without for that."
        if args.quick
        else f"{demo_report.verdict(results)}\n{demo_report.time_to_loss(results)}"
    )
    print(f"\n{minutes} min {seconds} s. Wrote {', '.join(map(str, files))} and the runs' logs.")
    return 0


def _train(name: str, output: Path, flags: Sequence[str], scale: Scale) -> Result:
    title, own_flags = MODES[name]
    script = Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
    arguments = ["-m", "megatron_async", "--cpu", str(script), *flags, *own_flags]
    log = output / f"{name}.log"
    seen = TrainingLog()
    with ProgressBar(f"{title:<26}", total=scale.iterations) as bar:
        bar.update(0, "starting")
        with Job(arguments, ranks=_RANKS, log=log, silence_s=_SILENCE_S) as job:
            for line in job.follow():
                if seen.feed(line) and seen.iterations:
                    last = seen.iterations[-1]
                    bar.update(last.number, f"iteration {last.number}, {_loss(last.loss)}")
        loss = seen.final_validation_loss
        if len(seen.iterations) != scale.iterations or loss is None:
            raise JobError(f"the run ended early; see {log}.")
        bar.update(scale.iterations, f"validation loss {loss:.4f}")
    return Result(name=name, title=title, log=seen)


def _loss(loss: float | None) -> str:
    return "no loss: it is not a number" if loss is None else f"loss {loss:.3f}"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async demo",
        description="Train a small GPT on two CPU ranks: synchronously, with PipeDream-2BW without "
        "and with the delay correction, and with fresh-2bw and the correction. A few minutes on "
        "two idle cores.",
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="about a minute; tells no losses")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo"
    )
    return parser
