"""What the start of a run would say of its arguments, without starting it.

The command line goes through Megatron's own parser and checks with the flags and the rules of this
package, as the hooks and the launcher have it (:mod:`megatron_async.config.startup`), but goes on
behind a problem to find the others. No process group is made, no GPU is touched, nothing of
Megatron is replaced beyond the call.
"""

import argparse
import contextlib
import copy
import inspect
import io
import linecache
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from megatron_async import hooks
from megatron_async.config import validation
from megatron_async.config.arguments import add_arguments, mend_help
from megatron_async.config.settings import AsyncConfig, set_defaults
from megatron_async.config.startup import flags_in
from megatron_async.config.validation.rule import Facts, Subject, dest_of
from megatron_async.optimizers import add_optimizer_arguments
from megatron_async.schedules import RECOMMENDED
from megatron_async.tools.forecast import check_model
from megatron_async.tools.named_files import exists, look_at_files, look_at_script
from megatron_async.tools.surroundings import Engine, pretended, without_engine
from megatron_async.tools.training_command import TrainingCommand

__all__ = ["Verdict", "judge"]

_CONNECTIONS: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_AT_LEAST_ONE: Final = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "max_position_embeddings",
    "vocab_size",
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "num_query_groups",
    "kv_channels",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "make_vocab_size_divisible_by",
)
_AT_LEAST_NONE: Final = ("train_iters", "train_samples", "eval_iters", "clip_grad")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found.

    Attributes:
        megatron: version of the Megatron that was asked.
        problems: what the run would end with, a message each, as at its start.
        warnings: what is unwise, likewise.
        notes: what the run would adjust, and what could not be looked at, a sentence each.
        subject: the arguments as they are at the start of training; None if there is a problem with
            them that leaves no numbers to go by.
    """

    megatron: str
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    subject: Subject | None = None

    @property
    def accepted(self) -> bool:
        """Whether the run would start."""
        return not self.problems


def judge(command: TrainingCommand) -> Verdict:
    """Find what the start of a run would say.

    The Megatron that is asked is the one that the script would run on: that of the script's folder
    if it holds one, and else the installed one. Imports it.
    """
    with pretended(command) as engine:
        return _judge(command, engine)


def _judge(command: TrainingCommand, engine: Engine) -> Verdict:
    script = Path(command.script)
    notes = list(command.notes)
    if not exists(script):
        notes.append(
            f"{script} is not here, so flags of its own are not known, and the Megatron that was "
            "asked is the installed one."
        )
    facts = replace(Facts.current(), flags_given=flags_in(list(command.arguments)))
    problems = [*look_at_script(script).problems, *_launching(command, facts)]
    conflicts: list[str] = []
    argv = list(command.arguments)
    if command.cpu:
        from megatron_async.cpu_backend import cpu_argv

        try:
            argv, added = cpu_argv(argv)
        except ValueError as error:
            conflicts = str(error).splitlines()
            problems += conflicts
        else:
            if added:
                notes.append(f"--cpu adds {' '.join(added)}.")
    if any(argument.partition("=")[0] == "--yaml-cfg" for argument in argv):
        problems += _broken(argparse.Namespace(yaml_cfg=True), facts)[0]
        return Verdict(megatron=facts.megatron_version, problems=tuple(problems))
    try:
        args = _parsed(argv, cpu=command.cpu)
    except _ParserError as error:
        problems.append(str(error))
        return Verdict(
            megatron=facts.megatron_version, problems=tuple(problems), notes=tuple(notes)
        )
    found = _checked(args, facts, problems, notes, engine)
    # A rule on a flag that --cpu has dropped anyway is the same mistake once more.
    refused = tuple(f"{conflict.split()[0]}:" for conflict in conflicts)
    return replace(
        found,
        problems=tuple(text for text in found.problems if not text.startswith(refused)),
        warnings=tuple(text for text in found.warnings if not text.startswith(refused)),
    )


def _launching(command: TrainingCommand, facts: Facts) -> list[str]:
    if command.launched is not False or not facts.flags_given or hooks.in_source():
        return []
    script = Path(command.script)
    with contextlib.suppress(OSError):  # look_at_script names it
        if "megatron_async" in script.read_text(errors="replace"):
            return []  # it calls install() itself
    return [
        (
            "-m megatron_async: Megatron does not know the flags of this package without it. Put "
            f"it ahead of {command.script}."
        )
    ]


class _ParserError(ValueError):
    """Megatron's parser ended at the command line."""


def _parsed(argv: list[str], *, cpu: bool) -> argparse.Namespace:
    from megatron.training.arguments import parse_args

    def ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if hooks.in_source():
            return parser  # has them
        return mend_help(add_optimizer_arguments(add_arguments(parser)))

    said = io.StringIO()
    try:
        with (
            mock.patch.object(sys, "argv", ["pretrain_gpt.py", *argv, *(["--cpu"] if cpu else [])]),
            contextlib.redirect_stderr(said),
        ):
            args: argparse.Namespace = parse_args(ours)
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if "error: " in line]
        why = lines[-1].partition("error: ")[2] if lines else "it prints its help and ends"
        raise _ParserError(_of_parser(why)) from None
    except Exception as error:
        raise _ParserError(f"Megatron's parser: {error}") from None
    return args


def _of_parser(why: str) -> str:
    kind, _, flags = why.partition(": ")
    if kind == "unrecognized arguments":
        return (
            f"{flags}: Megatron's parser does not know it. Mend it, or drop it (flags that a "
            "script adds itself are not known here)."
        )
    if kind.startswith("argument "):
        return f"{kind.removeprefix('argument ')}: {flags}. Mend its value."
    return f"Megatron's parser: {why}."


def _checked(
    args: argparse.Namespace,
    facts: Facts,
    problems: list[str],
    notes: list[str],
    engine: Engine,
) -> Verdict:
    """The rules on parsed arguments, Megatron's checks, the rules on what these leave."""
    if args.use_checkpoint_args:
        notes.append(
            "--use-checkpoint-args takes arguments from a checkpoint, which was not looked at."
        )
    if sizes := _sizes(args):
        # What is computed from them fails in ways that say nothing.
        return Verdict(
            megatron=facts.megatron_version, problems=(*problems, *sizes), notes=tuple(notes)
        )
    files = look_at_files(args)
    notes = [*notes, *files.notes]
    early = _broken(copy.deepcopy(args), facts, parsed_only=True)[0]
    problems = [*problems, *files.problems, *early]
    validated, megatrons = _validated(args)
    adjusted: list[str] = []
    unwise: list[str] = []
    if megatrons is None:
        adjusted = set_defaults(validated)
        configuration, failed = _configuration(validated)
        if (needed := without_engine(validated, engine)) is not None:
            if engine is Engine.ASSUMED:
                notes = [*notes, needed]
            else:
                problems = [*problems, needed]
                if "apply_rope_fusion" in (failed or ""):
                    failed = None  # the same
        found, unwise = _broken(validated, facts, configs=configuration)
        # What a rule on parsed arguments has found is what the configuration ends at, too.
        if failed is not None and not early and not _named(failed, found, args):
            problems.append(failed)
        problems += found
    else:
        found = ()
        # What the rules say is still worth knowing; where a number makes no sense they fail.
        with contextlib.suppress(Exception):
            derived = _derived(args)
            set_defaults(derived)
            at_once = derived.micro_batch_size * derived.data_parallel_size
            whole = derived.global_batch_size % at_once == 0
            found = tuple(
                text
                for text in _broken(derived, facts)[0]
                # Megatron's message is on a batch that does not divide; then it has no number of
                # microbatches to speak of.
                if whole or not text.startswith("--global-batch-size: a batch has")
            )
        if not early and not _named(megatrons, found, args):
            problems.append(megatrons)
        problems += found
    distinct = tuple(dict.fromkeys(problems))
    subject = None
    if not distinct:
        subject = Subject(args=validated, config=AsyncConfig.from_args(validated), facts=facts)
        try:
            check_model(subject)
        except ValueError as error:
            return Verdict(
                megatron=facts.megatron_version, problems=(f"{error}.",), notes=tuple(notes)
            )
        adjusted += validation.notes(validated, facts)
        if not subject.config.asynchronous:
            adjusted.append(
                f"No asynchronous schedule is asked for; add --pipeline-schedule {RECOMMENDED}."
            )
    return Verdict(
        megatron=facts.megatron_version,
        problems=distinct,
        warnings=tuple(unwise),
        notes=(*notes, *adjusted),
        subject=subject,
    )


def _sizes(args: argparse.Namespace) -> list[str]:
    none = [
        f"--{name.replace('_', '-')}: {value} is no size. Give at least 1."
        for name in _AT_LEAST_ONE
        if (value := getattr(args, name, None)) is not None and value < 1
    ]
    negative = [
        f"--{name.replace('_', '-')}: {value} is negative. Give 0 or more."
        for name in _AT_LEAST_NONE
        if (value := getattr(args, name, None)) is not None and value < 0
    ]
    return none + negative


def _broken(
    args: argparse.Namespace, facts: Facts, **how: Any
) -> tuple[tuple[str, ...], list[str]]:
    """(problems, warnings)"""
    try:
        return (), validation.check(args, facts, **how)
    except validation.ArgumentError as error:
        return error.problems, []


def _validated(args: argparse.Namespace) -> tuple[argparse.Namespace, str | None]:
    """What Megatron's checks make of the arguments, and what they end with."""
    from megatron.training.arguments import validate_args

    args = copy.deepcopy(args)
    if hooks.in_source():
        validate_args = inspect.unwrap(validate_args)  # without our checks
    try:
        validate_args(args)
    except (Exception, SystemExit) as error:
        return args, _of_megatron(error)
    return args, None


def _configuration(args: argparse.Namespace) -> tuple[tuple[object, ...], str | None]:
    from megatron.training.arguments import core_transformer_config_from_args

    try:
        return (core_transformer_config_from_args(args),), None
    except Exception as error:
        return (), _of_megatron(error)


def _of_megatron(error: BaseException) -> str:
    """Megatron's message, or the line that failed where it has none."""
    text = " ".join(str(error).split())
    if not text:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        line = linecache.getline(frame.filename, frame.lineno or 0).strip()
        text = f"`{line}` does not hold ({Path(frame.filename).name}, line {frame.lineno})"
    if _CONNECTIONS in text:
        # Megatron's message has no full stop, and does not say where.
        text = (
            f"{text.rstrip('.')}, which the command does not do, nor is it set here. Export it, or "
            f"put it in front: -- {_CONNECTIONS}=1 torchrun ... (examples/gpt.sh sets it so; GPUs "
            "from Blackwell on do without)."
        )
    return f"Megatron itself: {text}"


def _named(megatrons: str, found: Sequence[str], args: argparse.Namespace) -> bool:
    """Whether Megatron's message is on a switch that a rule refuses anyway: one mistake, and the
    rule's message says what to do."""
    said = re.sub(r"[-_]", " ", megatrons.lower())
    for text in found:
        flag = text.partition(":")[0]
        if isinstance(getattr(args, dest_of(flag), None), bool):
            name = re.sub(r"^use ", "", flag.removeprefix("--").replace("-", " "))
            if re.search(rf"\b{re.escape(name)}\b", said):
                return True
    return False


def _derived(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what the rules need of what ``validate_args`` derives."""
    args = copy.deepcopy(args)
    model = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    args.data_parallel_size = max(args.world_size // model, 1)
    args.gtp_weight_remat_size = 1
    virtual = args.num_virtual_stages_per_pipeline_rank
    if args.num_layers_per_virtual_pipeline_stage is not None:
        on_a_stage = args.num_layers // args.pipeline_model_parallel_size
        virtual = max(on_a_stage // args.num_layers_per_virtual_pipeline_stage, 1)
    args.virtual_pipeline_model_parallel_size = virtual
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    return args
