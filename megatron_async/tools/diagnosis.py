"""``megatron-async doctor -- COMMAND``: the verdict on a training command, as text."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from megatron_async.config.validation.rule import Subject
from megatron_async.planning.memory import StageMemory
from megatron_async.tools.forecast import Forecast, forecast
from megatron_async.tools.training_command import TrainingCommand
from megatron_async.tools.verdict import Verdict

__all__ = ["print_diagnosis"]

_WIDTH = 100


def print_diagnosis(command: TrainingCommand, verdict: Verdict, out: TextIO) -> None:
    """Print whether a command will run asynchronously, why not, and what it is expected to gain."""
    subject = verdict.subject
    if not verdict.accepted:
        count = len(verdict.problems)
        answer = f"Refused: {count} problem{'' if count == 1 else 's'} with the arguments."
    elif subject is not None and subject.config.asynchronous:
        answer = f"Accepted: it will run asynchronously, with {subject.config.schedule}."
    else:
        answer = "Accepted: it will run, synchronously."
    print(answer, file=out)
    _list("What is refused, and why", verdict.problems, out)
    _list("What is unwise", verdict.warnings, out)
    _list("What to know", verdict.notes, out)
    rows = [("Megatron", verdict.megatron), ("ranks", str(command.ranks))]
    if subject is not None:
        rows = [("Megatron", verdict.megatron), ("ranks", _ranks(command, subject))]
        if subject.config.asynchronous:
            rows += _rows(subject, forecast(subject))
    width = max(len(name) for name, _ in rows)
    print(file=out)
    for name, text in rows:
        print(
            textwrap.fill(
                text,
                _WIDTH,
                initial_indent=name.ljust(width + 2),
                subsequent_indent=" " * (width + 2),
            ),
            file=out,
        )


def _list(title: str, texts: Sequence[str], out: TextIO) -> None:
    if not texts:
        return
    print(f"\n{title}:", file=out)
    for number, text in enumerate(texts, start=1):
        # On one line, as at the start of a run, so that it can be searched for.
        print(f"  {number}. {text}", file=out)


def _ranks(command: TrainingCommand, subject: Subject) -> str:
    parts = [
        (subject.stages, "pipeline"),
        (int(subject.get("tensor_model_parallel_size", 1)), "tensor"),
        (int(subject.get("context_parallel_size", 1)), "context"),
        (subject.replicas, "data parallel"),
    ]
    shown = [f"{size} {name}" for size, name in parts if size > 1]
    return f"{command.ranks}" + (f" = {' x '.join(shown)}" if shown else "")


def _rows(subject: Subject, numbers: Forecast) -> Iterator[tuple[str, str]]:
    settings = subject.config
    record = settings.schedule_record
    p, m = subject.stages, numbers.microbatches
    how = "update deferred into the next batch" if settings.deferred_update else "update at the end"
    yield "schedule", f"{record.title if record else settings.schedule}, {how}"
    yield "correction", settings.correction_label
    yield "microbatches", f"m = {m} a batch, p = {p} stages"
    if p == 1:
        yield "expected gain", "1.00: one stage has no bubble"
    else:
        simulated = (
            ""
            if numbers.simulated_gain is None
            else f"; {numbers.simulated_gain:.2f} as `megatron-async plan` simulates it, with a "
            "backward of two forwards and no other times"
        )
        ideal = f"{numbers.ideal_gain:.2f} = (m + p - 1) / m times as fast as 1F1B"
        if not settings.deferred_update:
            ideal = f"less than {ideal}, which takes a deferred update"
        yield "expected gain", f"{ideal}{simulated}"
    yield (
        "delay share",
        f"{numbers.delay:.3g} updates late in the mean; by stage {_by_stage(numbers.delays)}",
    )
    if numbers.memory is None:
        yield "extra memory", f"not computed: no formulas for {numbers.uncounted}"
        return
    top = max(range(p), key=numbers.added)
    yield (
        "extra memory",
        (
            f"{_size(numbers.added(top))} on each rank of stage {top}, to which most is added: "
            f"{_parts(numbers.memory[top], numbers.more_activations[top])}"
        ),
    )
    added = [numbers.added(stage) for stage in range(p)]
    if len(set(added)) > 1:
        yield "", f"by stage {_by_size(added)}"


def _by_stage(values: Sequence[float]) -> str:
    if len(set(values)) == 1 and len(values) > 1:
        return f"{values[0]:.3g} everywhere"
    return " ".join(f"{value:.3g}" for value in values)


def _by_size(values: Sequence[int]) -> str:
    return ", ".join(_size(value) for value in values)


def _parts(memory: StageMemory, activations: int) -> str:
    parts = [
        (memory.second_version, "weight versions"),
        (memory.gradient_copy, "the gradients' copy"),
        (memory.correction, "the correction"),
        (memory.second_grad_buffer, "the second gradient buffer"),
        (activations, "more activations (an estimate)"),
    ]
    return ", ".join(f"{_size(size)} {name}" for size, name in parts if size) or "nothing"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 4 else f"{count / 2**20:.2f} MiB"
