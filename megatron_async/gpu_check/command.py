"""``megatron-async gpu-check``: does asynchronous training work on this machine's GPUs?

Small runs on two or four GPUs, or on one, are compared with each other, with runs on CPU ranks and
with ``megatron-async plan``. What was found is a table; the exit status is 1 if a check failed.
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_async.gpu_check import checks
from megatron_async.gpu_check.bench import Bench, RunFailed
from megatron_async.gpu_check.rows import Result, Row, not_checked, table
from megatron_async.gpu_check.run_log import MeasurementError
from megatron_async.gpu_check.runs import MachineError, examine
from megatron_async.gpu_check.training import LARGE, PIPELINE, SCHEDULE, SMALL, Model

__all__ = ["main"]

_NOT_ON_CPU = "not on CPU ranks"
_LIMIT_S = {False: 120.0, True: 600.0}  # of a run, by whether it is on CPU ranks


def main(argv: Sequence[str]) -> int:
    """Run the check. Returns 0 if nothing failed, 1 if something did, 2 if it cannot be run."""
    args = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        script = _script(args.megatron)
        machine = examine(cpu=args.cpu)
        if args.megatron is None and not machine.megatron:
            raise MachineError(
                "there is no Megatron: give --megatron PATH, a checkout of Megatron-LM "
                "(core_v0.19.0), or pip install megatron-core."
            )
        args.output.mkdir(parents=True, exist_ok=True)
    except MachineError as error:
        print(f"megatron-async gpu-check: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place = error.filename or args.output
        print(f"megatron-async gpu-check: {place}: {error.strerror}", file=sys.stderr)
        return 2
    print(machine.title, flush=True)
    limit_s = _LIMIT_S[args.cpu] if args.timeout is None else args.timeout
    bench = Bench(machine, script=script, output=args.output, limit_s=limit_s)
    rows = check(bench)
    failed = sum(row.result is Result.FAILED for row in rows)
    passed = sum(row.result is Result.PASSED for row in rows)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    text = "\n".join(
        [
            machine.title,
            "",
            table(rows),
            "",
            f"{passed} passed, {failed} failed, {len(rows) - passed - failed} not checked",
        ]
    )
    (args.output / "report.txt").write_text(text + "\n", encoding="utf-8")
    print(f"\n{text}. {minutes} min {seconds} s. Logs are in {args.output}.")
    return int(failed > 0)


def check(bench: Bench) -> list[Row]:
    """All checks, in order; a run that fails is a failed row of each check that needs it."""
    machine = bench.machine
    todo: list[tuple[str, Callable[[Bench], Row]]] = [
        ("deferred updates' losses", _deferred),
        ("one step of delay shows", _delay),
        ("losses of CPU ranks", _cpu_ranks),
        ("Transformer Engine's losses", _transformer_engine),
        ("races, CUDA sanitizer", _races),
    ]
    if machine.cpu or machine.stages > 1:
        model = SMALL if machine.cpu else PIPELINE
        todo += [
            ("bubble", _against_1f1b(checks.bubble)),
            ("speed over 1F1B", _against_1f1b(checks.speed)),
        ]
        todo += _memory(
            model, "2bw", "1f1b", stages=machine.stages, microbatches=machine.microbatches
        )
    else:
        todo += [("bubble", _needs_two), ("speed over 1F1B", _needs_two)]
    if machine.cpu or machine.stages == 1:
        model = SMALL if machine.cpu else LARGE
        todo.append(("time over plain Megatron", _overhead))
        todo += _memory(model, "one-stage-2bw", "one-stage-megatron", stages=1, microbatches=8)
    return [_row(name, function, bench) for name, function in todo]


def _row(name: str, function: Callable[[Bench], Row], bench: Bench) -> Row:
    try:
        row = function(bench)
    except (RunFailed, MeasurementError) as error:
        row = Row.failed(str(error))
    return replace(row, name=name)


def _on_gpus(bench: Bench, row: Row) -> Row:
    """Shown and not judged on CPU ranks, where the numbers say nothing of GPUs."""
    return not_checked(_NOT_ON_CPU, row) if bench.machine.cpu else row


def _deferred(bench: Bench) -> Row:
    return checks.same_losses(bench.log("small-2bw"), bench.log("small-2bw-undeferred"))


def _delay(bench: Bench) -> Row:
    return checks.delay_shows(bench.log("small-2bw"), bench.log("small-1f1b"))


def _cpu_ranks(bench: Bench) -> Row:
    if bench.machine.cpu:
        return not_checked(_NOT_ON_CPU)
    return checks.same_losses(bench.log("small-2bw"), bench.log("small-2bw-cpu-ranks"))


def _transformer_engine(bench: Bench) -> Row:
    if bench.machine.cpu:
        return not_checked(_NOT_ON_CPU)
    if not bench.machine.transformer_engine:
        return not_checked("not installed; all runs had --transformer-impl local")
    return checks.same_losses(bench.log("small-2bw-te"), bench.log("small-2bw"))


def _races(bench: Bench) -> Row:
    if bench.machine.cpu:
        return not_checked(_NOT_ON_CPU)
    log = bench.log("sanitizer-2bw", with_races=True)
    planted = bench.log("sanitizer-planted-race", with_races=True)
    plain = bench.log("sanitizer-1f1b", with_races=True) if log.races else None
    return checks.no_race(log, planted, plain)


def _needs_two(bench: Bench) -> Row:
    return not_checked("needs two GPUs")


def _against_1f1b(check: Callable[..., Row]) -> Callable[[Bench], Row]:
    """A check of the large model's pipeline against Megatron's own."""

    def row(bench: Bench) -> Row:
        machine = bench.machine
        logs = bench.log("2bw"), bench.log("1f1b")
        measured = check(*logs, stages=machine.stages, microbatches=machine.microbatches)
        return _on_gpus(bench, measured)

    return row


def _overhead(bench: Bench) -> Row:
    row = checks.overhead(bench.log("one-stage-2bw"), bench.log("one-stage-megatron"))
    return _on_gpus(bench, row)


def _memory(
    model: Model, asynchronous: str, synchronous: str, *, stages: int, microbatches: int
) -> list[tuple[str, Callable[[Bench], Row]]]:
    """The three checks of memory against the plan, for the runs of one model and layout."""

    def plan(bench: Bench) -> list[checks.Parts]:
        return bench.plan(model, stages=stages, microbatches=microbatches, schedule=SCHEDULE)

    def added(bench: Bench) -> Row:
        logs = bench.log(asynchronous), bench.log(synchronous)
        return _on_gpus(bench, checks.added_memory(*logs, plan(bench)))

    def held(bench: Bench) -> Row:
        return _on_gpus(bench, checks.held_memory(bench.log(asynchronous), plan(bench)))

    def peak(bench: Bench) -> Row:
        return _on_gpus(bench, checks.peak_memory(bench.log(asynchronous), plan(bench)))

    where = f"{stages} stages" if stages > 1 else "1 stage"
    return [
        (f"memory added, {where}", added),
        (f"memory held, {where}", held),
        (f"memory at the peak, {where}", peak),
    ]


def _script(megatron: Path | None) -> Path:
    if megatron is None:
        return Path(__file__).parents[1] / "scripts" / "pretrain_gpt.py"
    script = megatron / "pretrain_gpt.py"
    if not script.is_file():
        raise MachineError(
            f"{megatron} has no pretrain_gpt.py: --megatron wants a checkout of Megatron-LM "
            "(core_v0.19.0). Without it, the check takes the Megatron that is installed."
        )
    return script


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async gpu-check",
        description="Check asynchronous training on this machine's GPUs, in under five minutes: "
        "losses, bubble, memory, races. Two or four GPUs make a pipeline; one is compared with "
        "plain Megatron.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--cpu", action="store_true", help="on CPU ranks; what cannot be checked there is marked"
    )
    parser.add_argument(
        *("--out", "--output"),
        dest="output",
        type=Path,
        default=Path("runs/gpu-check"),
        metavar="DIR",
        help="for logs and the table; default: runs/gpu-check",
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="PATH",
        help="a checkout of Megatron-LM, whose pretrain_gpt.py and Megatron are taken; by default "
        "the Megatron that is installed",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help="seconds until a run is stopped (default 120; 600 on CPU ranks)",
    )
    return parser
