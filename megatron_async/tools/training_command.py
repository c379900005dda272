"""Reads a training command as a shell, torchrun and the launcher would, and starts nothing.

Understood: torchrun (also ``python -m torch.distributed.run``), plain python, the script alone,
each with or without ``-m megatron_async``; in front of them any other program (srun, env, nohup,
numactl, a container's), variables, and ``bash -c`` with a text of several commands.
"""

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

__all__ = ["CommandError", "TrainingCommand", "read_command"]

_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE: Final = re.compile(r"\$\{?(\w+|[@*])\}?|`|\$\(")
_PYTHON: Final = re.compile(r"python(\d+(\.\d+)*)?$")
_SHELLS: Final = frozenset({"sh", "bash", "zsh", "dash"})
_OPERATORS: Final = frozenset("();<>|&\n")
_LAUNCHER: Final = "megatron_async"
_TORCHRUN_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch")


class CommandError(ValueError):
    """A command that cannot be read; the message says what to give instead."""


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """What of a command decides on the run.

    Attributes:
        script: the training script, or the module of another ``-m``.
        arguments: the script's, ``--cpu`` left out.
        ranks: the world size.
        cpu: whether ``--cpu`` was given.
        launched: whether ``-m megatron_async`` stands ahead of the script; None where the script
            was given alone, so that nothing says how it will be started.
        variables: set by the command itself.
        notes: what was decided while reading it, a sentence each.
    """

    script: str
    arguments: tuple[str, ...]
    ranks: int = 1
    cpu: bool = False
    launched: bool | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_command(
    words: Sequence[str],
    *,
    world_size: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> TrainingCommand:
    """Read a command.

    Args:
        words: as a shell has split them; a single word is split here.
        world_size: ranks of the run; by default those of torchrun, of srun where there is no
            torchrun, or of ``WORLD_SIZE``.
        environment: for variables in a text that is split here; by default the process's.

    Raises:
        CommandError: it cannot be read.
    """
    environment = dict(os.environ if environment is None else environment)
    words = list(words)
    if len(words) == 1 and any(character.isspace() for character in words[0]):
        command = _of_text(words[0], environment)
    else:
        command = _of_words(words, environment)
    if world_size is not None:
        if world_size < 1:
            raise CommandError(f"--world-size: {world_size} is no number of ranks. Give 1 or more.")
        command = replace(command, ranks=world_size)
    return command


def _of_text(text: str, environment: Mapping[str, str]) -> TrainingCommand:
    """A text of one or several commands: the one that trains, with the variables set before it."""
    variables: dict[str, str] = {}
    reasons = []
    for words in _split(text):
        if words[0] in ("export", "set", "cd", "source", "."):
            variables |= dict(_assignments(words[1:]))
            continue
        if all(_ASSIGNMENT.match(word) for word in words):
            variables |= dict(_assignments(words))
            continue
        known = {**environment, **variables}
        try:
            command = _of_words([part for word in words for part in _expanded(word, known)], known)
        except CommandError as error:
            reasons.append(str(error))
            continue
        return replace(command, variables={**variables, **command.variables})
    raise CommandError(reasons[0] if reasons else _nothing(text.split()))


def _split(text: str) -> Iterator[list[str]]:
    """The commands of a text, without redirections."""
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    words: list[str] = []
    redirected = False
    try:
        for token in lexer:
            if not set(token) <= _OPERATORS:
                if not redirected:
                    words.append(token)
                redirected = False
            elif set(token) & set("<>"):
                if words and words[-1].isdigit():
                    words.pop()  # the number of a stream, as in 2>&1
                redirected = True
            elif token.startswith("(") and words and words[-1].endswith("$"):
                raise CommandError(
                    f"$( ) behind {shlex.join(words[:-1])} would have to be run to be read. Write "
                    "its value out."
                )
            elif words:
                yield words
                words = []
    except ValueError as error:
        raise CommandError(f"the command's quotes do not match ({error})") from None
    if words:
        yield words


def _expanded(word: str, known: Mapping[str, str]) -> list[str]:
    """A word with its variables replaced, split as a shell does; nothing if it is empty then."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None or name not in known:
            raise CommandError(
                f"{word}: {f'the variable {name}' if name else 'a command'} has no value here. "
                "Export it, or write the value out."
            )
        return known[name]

    replaced = _VARIABLE.sub(value, word)
    return [word] if replaced == word else replaced.split()


def _assignments(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those in front of a command, srun's ``--export=ALL,A=1`` and containers' ``--env=A=1``."""
    for word in words:
        flag, _, listed = word.partition("=")
        each = listed.split(",") if flag == "--export" else [listed] if flag == "--env" else [word]
        for text in each:
            if _ASSIGNMENT.match(text):
                name, _, value = text.partition("=")
                yield name, value


def _of_words(words: Sequence[str], environment: Mapping[str, str]) -> TrainingCommand:
    for index, word in enumerate(words):
        name = Path(word).name
        before, rest = words[:index], list(words[index + 1 :])
        if name in _SHELLS:
            command = _of_shell(rest, environment)
        elif name == "torchrun":
            command = _of_torchrun(rest, environment)
        elif _PYTHON.match(name):
            command = _of_python(rest, before, environment)
        elif name.endswith(".py") and not word.startswith("-"):
            command = _of_script(
                word, rest, ranks=_tasks(before) or _ranks_of(environment), launched=None
            )
        else:
            continue
        return replace(command, variables={**dict(_assignments(before)), **command.variables})
    raise CommandError(_nothing(words))


def _nothing(words: Sequence[str]) -> str:
    what = f"`{shlex.join(words[:4])}{' ...' if len(words) > 4 else ''}`" if words else "nothing"
    return (
        f"{what} is no training command. Give one such as `torchrun --nproc-per-node 8 -m "
        "megatron_async pretrain_gpt.py ...`, or the script and its arguments."
    )


def _of_shell(words: Sequence[str], environment: Mapping[str, str]) -> TrainingCommand:
    for index, word in enumerate(words):
        if not word.startswith("-"):
            raise CommandError(
                f"{word} is a shell script, which would have to be run to be read. Give the "
                "command that it ends in; `bash -x` prints it."
            )
        if not word.startswith("--") and word.endswith("c"):
            if index + 1 == len(words):
                raise CommandError("the shell's -c has no text")
            return _of_text(words[index + 1], environment)
    raise CommandError("a shell without -c reads its commands from elsewhere. Give them.")


def _of_torchrun(words: Sequence[str], environment: Mapping[str, str]) -> TrainingCommand:
    from torch.distributed.run import get_args_parser

    stream = io.StringIO()
    try:
        with contextlib.redirect_stderr(stream), contextlib.redirect_stdout(stream):
            args = get_args_parser().parse_args(list(words))
    except SystemExit:
        said = [line for line in stream.getvalue().splitlines() if "error: " in line]
        why = said[-1].partition("error: ")[2] if said else "it only prints its help"
        raise CommandError(f"torchrun cannot read its part of the command: {why}") from None
    notes = []
    nodes, _, most = str(args.nnodes).partition(":")
    if most and most != nodes:
        notes.append(f"torchrun starts {nodes} to {most} nodes; this is for {most}.")
    per_node = str(args.nproc_per_node)
    if per_node in ("gpu", "auto", "cpu", "xpu"):
        import torch

        count = torch.cuda.device_count() if per_node != "cpu" else os.cpu_count() or 0
        if not count:
            raise CommandError(
                f"torchrun's --nproc-per-node {per_node} depends on the machine, and this one has "
                "no GPU. Give the number."
            )
        notes.append(f"torchrun's --nproc-per-node {per_node} is {count} on this machine.")
        per_node = str(count)
    ranks = _number("--nnodes", most or nodes) * _number("--nproc-per-node", per_node)
    script, rest = str(args.training_script), list(args.training_script_args)
    if args.no_python:
        command = replace(_of_words([script, *rest], environment), ranks=ranks)
    elif args.module:
        command = _of_module(script, rest, ranks=ranks)
    else:
        command = _of_script(script, rest, ranks=ranks, launched=False)
    return replace(command, notes=(*notes, *command.notes))


def _number(flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise CommandError(f"torchrun's {flag} is {text!r}, which is no number above 0")
    return int(text)


def _of_python(
    words: Sequence[str], before: Sequence[str], environment: Mapping[str, str]
) -> TrainingCommand:
    ranks = _tasks(before) or _ranks_of(environment)
    index = 0
    while index < len(words):
        word, rest = words[index], words[index + 1 :]
        if word == "-m":
            if not rest:
                raise CommandError("python's -m has no module")
            if rest[0] in _TORCHRUN_MODULES:
                return _of_torchrun(rest[1:], environment)
            return _of_module(rest[0], rest[1:], ranks=ranks)
        if word == "-c":
            raise CommandError("python -c runs a text. Give the script that trains.")
        if not word.startswith("-"):
            return _of_script(word, rest, ranks=ranks, launched=False)
        index += 2 if word in ("-X", "-W") else 1
    raise CommandError("python runs no script. Give the one that trains.")


def _of_module(module: str, words: Sequence[str], *, ranks: int) -> TrainingCommand:
    if module != _LAUNCHER:
        return _of_script(module, words, ranks=ranks, launched=False)
    # As the launcher has it: --cpu may stand anywhere, and the script comes first.
    left = [word for word in words if word != "--cpu"]
    if not left:
        raise CommandError("-m megatron_async is followed by no script")
    if left[0].startswith("-"):
        raise CommandError(f"-m megatron_async: the script comes first, and {left[0]} behind it")
    command = _of_script(left[0], left[1:], ranks=ranks, launched=True)
    return replace(command, cpu="--cpu" in words)


def _of_script(
    script: str, words: Sequence[str], *, ranks: int, launched: bool | None
) -> TrainingCommand:
    return TrainingCommand(
        script=script,
        arguments=tuple(word for word in words if word != "--cpu"),
        ranks=ranks,
        cpu="--cpu" in words,
        launched=launched,
    )


def _ranks_of(environment: Mapping[str, str]) -> int:
    value = environment.get("WORLD_SIZE", "1")
    return int(value) if value.isdigit() and int(value) else 1


def _tasks(words: Sequence[str]) -> int | None:
    """Ranks that srun starts without torchrun; None if that is not said."""
    if not any(Path(word).name == "srun" for word in words):
        return None
    found: dict[str, int] = {}
    names = {"-n": "--ntasks", "-N": "--nodes"}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if not equals and re.fullmatch(r"-[nN]\d+", word):
            flag, value = word[:2], word[2:]
        elif not equals:
            value = following
        if value.isdigit():
            found[names.get(flag, flag)] = int(value)
    if "--ntasks" in found:
        return found["--ntasks"]
    if "--ntasks-per-node" in found:
        return found["--ntasks-per-node"] * found.get("--nodes", 1)
    return None
