"""NVIDIA's own functional-test configurations with several pipeline stages, under our flags.

``tests/functional_tests/test_cases`` of a checkout of Megatron-LM has a ``model_config.yaml`` each.
Each one gets the recommended schedule and goes through the doctor as it is, for the eight GPUs it
is written for; what that accepts is scaled down and trained on CPU ranks. The page is made by

    python -m tests.slow.nvidia_cases CHECKOUT > docs/nvidia_cases.md
"""

import dataclasses
import math
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from megatron_async.config.startup import flags_in
from megatron_async.cpu_backend import cpu_argv
from megatron_async.schedules import RECOMMENDED
from megatron_async.tools.training_command import TrainingCommand
from megatron_async.tools.verdict import judge
from tests.support.forked import ForkedJob, Record, run_forked

__all__ = ["Case", "Outcome", "load", "main", "outcomes"]

FAMILIES: Final = ("gpt", "moe")
GPUS: Final = 8
WITHOUT_TE: Final = ("--moe-permute-fusion",)
"""Refused by Megatron itself where Transformer Engine is not installed."""
ONE_VALUE: Final = ("--step-batch-size-schedule",)
"""Flags whose value has spaces."""
REPLACED: Final = (
    *("--data-path", "--data-cache-path", "--vocab-file", "--merge-file", "--tokenizer-type"),
    *("--tokenizer-model", "--split", "--save", "--load", "--save-interval"),
    *("--save-retain-interval", "--dump-param-to-param-group-map"),
    *("--tensorboard-dir", "--async-save", "--use-persistent-ckpt-worker", "--ckpt-format"),
    *("--dist-ckpt-strictness", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    *("--exit-interval", "--exit-duration-in-mins", "--dist-ckpt-optim-fully-reshardable"),
    *("--train-samples", "--lr-decay-samples", "--lr-warmup-samples", "--lr-warmup-fraction"),
    *("--lr-decay-iters", "--lr-warmup-iters", "--train-iters", "--eval-interval", "--eval-iters"),
    *("--num-workers", "--no-mmap-bin-files", "--ckpt-fully-parallel-load", "--profile"),
    *("--profile-step-start", "--profile-step-end", "--record-memory-history"),
    *("--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--seq-length"),
    *("--max-position-embeddings", "--kv-channels", "--moe-ffn-hidden-size"),
    *("--moe-shared-expert-intermediate-size", "--micro-batch-size", "--global-batch-size"),
    *("--tensor-model-parallel-size", "--expert-model-parallel-size", "--log-throughput"),
    *("--expert-tensor-parallel-size", "--rotary-percent", "--num-query-groups"),
    *("--moe-grouped-gemm", "--transformer-impl", "--attention-backend", "--distributed-backend"),
    *("--use-flash-attn", "--tp-comm-overlap", "--cross-entropy-fusion-impl"),
    *("--log-memory-to-tensorboard", "--vocab-size", "--make-vocab-size-divisible-by"),
    *("--deterministic-mode", "--non-persistent-save-interval", "--moe-token-dispatcher-type"),
    *("--async-strategy", "--async-ckpt-use-cached-metadata", "--async-ckpt-use-cpu-shm"),
    *("--num-layers", "--tokenizer-hf-include-special-tokens", "--use-mcore-models"),
    *("--cross-entropy-loss-fusion", "--log-progress", "--dist-ckpt-save-pre-mcore-014"),
)  # fmt: skip
"""What scaling down gives anew or leaves out: data, sizes, files, kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A configuration: its flags, each with its values, and the variables it sets."""

    name: str
    flags: Mapping[str, tuple[str, ...]]
    variables: Mapping[str, str]

    def number(self, flag: str, default: int = 1) -> int:
        """The value of a flag that takes a number."""
        return int(self.flags[flag][0]) if flag in self.flags else default

    @property
    def argv(self) -> list[str]:
        """The command line, with the schedule's flag."""
        words = [word for flag, values in self.flags.items() for word in (flag, *values)]
        return [*words, "--pipeline-schedule", RECOMMENDED]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case.

    Attributes:
        refused: the problems, a message each.
        untried: why it was accepted and not run.
        failed: what its run ended with.
        losses: of its run.
    """

    case: Case
    refused: tuple[str, ...] = ()
    untried: str = ""
    failed: str = ""
    losses: tuple[float, ...] = ()


def load(checkout: Path) -> list[Case]:
    """Read the training configurations with several pipeline stages."""
    found = []
    root = checkout / "tests" / "functional_tests" / "test_cases"
    for family in FAMILIES:
        for file in sorted((root / family).glob("*/model_config.yaml")):
            content = yaml.safe_load(file.read_text())
            given = content.get("MODEL_ARGS")
            if not isinstance(given, dict) or re.search("inference|grpo", file.parent.name):
                continue
            flags = {
                str(flag): (str(value),) if flag in ONE_VALUE else _values(value)
                for flag, value in given.items()
                if value is not False
            }
            variables = {str(k): str(v) for k, v in (content.get("ENV_VARS") or {}).items()}
            case = Case(name=f"{family}/{file.parent.name}", flags=flags, variables=variables)
            if case.number("--pipeline-model-parallel-size") > 1:
                found.append(case)
    return found


def _values(value: object) -> tuple[str, ...]:
    if value is True:
        return ()
    if isinstance(value, list):
        return tuple(str(each) for each in value)
    # Some write a list as text; others quote it for the shell that starts them.
    text = str(value).strip()
    if text[:1] + text[-1:] == "''" or text[:1] + text[-1:] == '""':
        return (text[1:-1],)
    return (
        tuple(text.strip("[]").replace(",", " ").split())
        if text.startswith("[")
        else tuple(text.split())
    )


def refused(case: Case) -> tuple[str, ...]:
    """What the doctor has against a case on its eight GPUs."""
    argv = [word for word in case.argv if word not in WITHOUT_TE]
    ranks = max(GPUS, math.prod(case.number(f"--{name}-parallel-size") for name in (
        "tensor-model", "pipeline-model", "context")))  # fmt: skip
    command = TrainingCommand(
        script="pretrain_gpt.py",
        arguments=(*argv, "--no-rope-fusion"),
        ranks=ranks,
        launched=True,
        variables=case.variables,
    )
    assert flags_in(argv)
    problems = judge(command).problems
    # What is not installed here says nothing of the configuration.
    ours = tuple(problem for problem in problems if "transformer-engine" not in problem)
    return ours or problems


def scaled(case: Case) -> tuple[int, list[str]] | str:
    """Ranks and command line of a small run on CPU ranks, or why there is none."""
    if case.number("--context-parallel-size") > 1:
        return "its attention across ranks, Transformer Engine's, needs GPUs"
    stages = case.number("--pipeline-model-parallel-size")
    tensor = min(case.number("--tensor-model-parallel-size"), max(4 // stages, 1))
    experts = 2 if case.number("--expert-model-parallel-size") > 1 and stages * tensor <= 2 else 1
    kept = {flag: values for flag, values in case.flags.items() if flag not in REPLACED}
    if tensor == 1:
        kept.pop("--sequence-parallel", None)
        kept.pop("--tp-comm-overlap", None)
    if experts == 1:
        kept.pop("--moe-token-drop-policy", None)
    ranks = stages * tensor * experts
    batch = case.number("--global-batch-size", 2 * stages)
    replicas = max(GPUS // stages // case.number("--tensor-model-parallel-size"), 1)
    microbatches = min(max(batch // case.number("--micro-batch-size") // replicas, 1), 2 * stages)
    layers = case.number("--num-layers")
    uneven = any("pipeline-num-layers" in flag or "pipeline-split" in flag for flag in kept)
    groups = "--group-query-attention" in kept
    new = [
        *("--num-layers", str(layers if uneven else stages * 2), "--hidden-size", "64"),
        *("--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
        *("--vocab-size", "256", "--mock-data", "--tokenizer-type", "NullTokenizer"),
        *("--micro-batch-size", "1", "--global-batch-size", str(microbatches * experts)),
        *("--train-iters", "5", "--eval-iters", "1", "--eval-interval", "3", "--num-workers", "0"),
        *("--tensor-model-parallel-size", str(tensor)),
        *("--expert-model-parallel-size", str(experts)),
        *(("--num-query-groups", "2") if groups else ()),
        *(("--moe-token-dispatcher-type", "alltoall") if "--num-experts" in kept else ()),
        *(
            ("--moe-shared-expert-intermediate-size", "64")
            if "--moe-shared-expert-intermediate-size" in case.flags
            else ()
        ),
        *("--pipeline-schedule", RECOMMENDED, "--distributed-timeout-minutes", "2"),
    ]
    argv = [word for flag, values in kept.items() for word in (flag, *values)]
    # What the dropped data of the learning rate's schedule leaves is 5 iterations of it.
    return ranks, [*argv, *new]


def outcomes(cases: Sequence[Case]) -> list[Outcome]:
    """Ask the doctor, and run what it accepts. Each run is done deferred and undeferred, from the
    same seed, and has to give the same losses."""
    found: dict[str, Outcome] = {}
    runs: dict[int, list[tuple[Case, list[str]]]] = {}
    for case in cases:
        if problems := refused(case):
            found[case.name] = Outcome(case=case, refused=problems)
            continue
        small = scaled(case)
        if isinstance(small, str):
            found[case.name] = Outcome(case=case, untried=small)
            continue
        try:
            cpu_argv(small[1])
        except ValueError as error:
            found[case.name] = Outcome(case=case, untried=str(error))
            continue
        runs.setdefault(small[0], []).append((case, small[1]))
    with tempfile.TemporaryDirectory() as directory:
        for ranks, members in runs.items():
            # Configurations that differ in what is left out run once.
            distinct = list(dict.fromkeys(tuple(argv) for _, argv in members))
            jobs = [
                ForkedJob(
                    directory=Path(directory) / f"{ranks}-{index}-{kind}", argv=[*argv, *more]
                )
                for index, argv in enumerate(distinct)
                for kind, more in (("deferred", ()), ("undeferred", ("--no-deferred-update",)))
            ]
            records = run_forked(ranks, jobs)
            for case, argv in members:
                index = 2 * distinct.index(tuple(argv))
                found[case.name] = _outcome(case, records[index], records[index + 1])
    return [found[case.name] for case in cases]


def _outcome(case: Case, deferred: Record, undeferred: Record) -> Outcome:
    for record in (deferred, undeferred):
        if record.failed:
            return Outcome(case=case, failed=record.describe())
    one, other = (_losses(record) for record in (deferred, undeferred))
    if len(one) != 5 or not all(math.isfinite(loss) for loss in one):
        return Outcome(case=case, failed=f"losses {one}")
    tolerance = 1e-3 if "--bf16" in case.flags else 1e-5
    if any(abs(a - b) > tolerance * abs(b) for a, b in zip(one, other, strict=True)):
        return Outcome(case=case, failed=f"deferred {one}, undeferred {other}")
    return Outcome(case=case, losses=one)


def _losses(record: Record) -> tuple[float, ...]:
    last = record.numbers[-1]
    assert last is not None
    return tuple(last["losses"])


_HEAD: Final = """\
<!-- Made by: python -m tests.slow.nvidia_cases CHECKOUT > docs/nvidia_cases.md -->
# NVIDIA's functional-test configurations

The {count} training configurations of Megatron-LM's `tests/functional_tests/test_cases`
({families}) with several pipeline stages, with `--pipeline-schedule {schedule}`.

- **works** ({works}): accepted for its eight GPUs (`megatron-async doctor`), and trained for five
  iterations on CPU ranks after scaling down: hidden size 64, two layers a stage, sequences of 32
  tokens, mock data, no Transformer Engine, at most four ranks. Deferred and undeferred updates
  gave the same losses.
- **accepted** ({accepted}): accepted, and not run.
- **refused** ({refused}): ends before training, with these reasons.

The kernels, precisions and collectives of GPUs were not run.

| configuration | result | reason |
| --- | --- | --- |"""


def render(found: Sequence[Outcome]) -> str:
    """The page, in Markdown."""
    counts = {
        "works": sum(bool(each.losses) for each in found),
        "accepted": sum(bool(each.untried) for each in found),
        "refused": sum(bool(each.refused) for each in found),
    }
    lines = [
        _HEAD.format(
            count=len(found), families=" and ".join(FAMILIES), schedule=RECOMMENDED, **counts
        )
    ]
    for each in found:
        if each.refused:
            result, why = "refused", ", ".join(_flags(each.refused))
        elif each.untried:
            result, why = "accepted", each.untried
        else:
            result, why = ("works", "") if each.losses else ("**fails**", "")
        lines.append(f"| `{each.case.name}` | {result} | {why} |")
    return "\n".join(lines) + "\n"


def _flags(problems: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(_flag(problem) for problem in problems))


def _flag(problem: str) -> str:
    name, _, text = problem.partition(": ")
    return f"`{name}`" if name.startswith("--") else f"{name}: {text.rstrip('.')}"


def main(argv: Sequence[str]) -> None:
    """Print the page; what failed goes to standard error."""
    found = outcomes(load(Path(argv[0])))
    sys.stdout.write(render(found))
    for each in found:
        if each.failed:
            print(f"{each.case.name}\n{each.failed}\n", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
