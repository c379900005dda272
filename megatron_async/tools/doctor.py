"""``megatron-async doctor``: what is installed, what of it is supported, and what to fix.

With a training command behind ``--`` it says instead whether that will run asynchronously.

The supported versions are those that the package itself declares (pyproject.toml). The hooks are
checked by looking up every attribute that they would replace; nothing is replaced.
"""

import argparse
import importlib
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_async.megatron import releases
from megatron_async.megatron.replaced import is_for

__all__ = ["Finding", "Status", "examine", "main"]

_PACKAGE = "megatron-async"
_REQUIRED = ("torch", "megatron-core", "emerging-optimizers", "psutil")


class Status(StrEnum):
    """How a finding bears on training."""

    OK = "ok"
    NOTE = "note"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: whether it is in order.
        subject: what was looked at.
        text: what was found.
        fix: what to do, for everything that is not in order.
    """

    status: Status
    subject: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<5} {self.subject:<20} {self.text}"
        return f"{line}\n{'':<6}{'':<20} -> {self.fix}" if self.fix else line


def examine() -> Iterator[Finding]:
    """Yield the findings, the cheap ones first; importing torch and Megatron takes seconds."""
    requirements = _requirements()
    yield _python(requirements)
    for name in _REQUIRED:
        yield _distribution(name, requirements)
    yield _transformer_engine()
    for check in (_gpus, _megatron_training, _dataset_helpers, _hooks, _cpu_backend):
        try:
            yield check()
        except Exception as error:  # a broken installation can raise anything
            subject = check.__name__.strip("_").replace("_", " ")
            text = f"the check failed: {type(error).__name__}: {error}"
            yield Finding(Status.FAIL, subject, text, "mend what is reported above first")
    yield _connections()


def main(argv: Sequence[str]) -> int:
    """Print the report; the exit status is 1 if something has to be fixed, or if the command is
    refused, and 2 if it cannot be read."""
    parser = argparse.ArgumentParser(
        prog="megatron-async doctor",
        usage="%(prog)s [-h]\n       %(prog)s [--world-size N] -- COMMAND",
        description="Say what is installed, what of it is supported, and what to fix. With a "
        "training command, say whether it will run asynchronously, what is refused and why, what "
        "is unwise, and what gain, delay and memory to expect. Nothing is started.",
        epilog="Exit status: 0 if all is in order, 1 if not, 2 if the command cannot be read.",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the run, where the command does not say it",
    )
    parser.add_argument(
        "command",
        nargs="*",
        metavar="COMMAND",
        help="such as `torchrun --nproc-per-node 8 -m megatron_async pretrain_gpt.py ...`",
    )
    args = parser.parse_args(argv)
    if args.command:
        return _diagnose(args.command, args.world_size)
    if "--" in argv or args.world_size is not None:
        parser.error("the training command is missing; it stands behind --")
    failed = False
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Megatron lacks is reported below
            for finding in examine():
                print(finding, flush=True)
                failed = failed or finding.status is Status.FAIL
    finally:
        logging.disable(logging.NOTSET)
    print("Something has to be fixed, see FAIL." if failed else "Ready to train.")
    return int(failed)


def _diagnose(words: Sequence[str], world_size: int | None) -> int:
    from megatron_async.tools.training_command import CommandError, read_command

    try:
        command = read_command(words, world_size=world_size)
    except CommandError as error:
        print(f"megatron-async doctor: {error}", file=sys.stderr)
        return 2
    # Imported here: they take Megatron along.
    from megatron_async.tools.diagnosis import print_diagnosis
    from megatron_async.tools.verdict import judge

    verdict = judge(command)
    print_diagnosis(command, verdict, sys.stdout)
    return 0 if verdict.accepted else 1


def _requirements() -> dict[str, SpecifierSet]:
    """The supported versions by distribution; empty if the package is not installed as one."""
    try:
        declared = metadata.metadata(_PACKAGE)
    except metadata.PackageNotFoundError:
        return {}
    parsed = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    specifiers = {one.name: one.specifier for one in parsed if one.marker is None}
    specifiers["python"] = SpecifierSet(declared["Requires-Python"] or "")
    return specifiers


def _python(requirements: dict[str, SpecifierSet]) -> Finding:
    version = platform.python_version()
    if not requirements:
        return Finding(
            Status.FAIL,
            "megatron-async",
            "runs from its source without being installed",
            "pip install -e . in its folder, so that its requirements are met",
        )
    if requirements["python"].contains(version):
        return Finding(Status.OK, "python", f"{version} ({sys.executable})")
    fix = f"use a Python {requirements['python']}; `make install` finds one"
    return Finding(Status.FAIL, "python", f"{version} is not supported", fix)


def _distribution(name: str, requirements: dict[str, SpecifierSet]) -> Finding:
    specifier = requirements.get(name, SpecifierSet())
    fix = f"pip install '{name}{specifier}'"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(Status.FAIL, name, "not installed", fix)
    if specifier.contains(version, prereleases=True):
        return Finding(Status.OK, name, version)
    return Finding(Status.FAIL, name, f"{version} is not supported (needs {specifier})", fix)


def _transformer_engine() -> Finding:
    name = "transformer-engine"
    try:
        return Finding(Status.OK, name, metadata.version(name))
    except metadata.PackageNotFoundError:
        fix = "pip install 'megatron-async[gpu]'; on CPU ranks it is not used"
        return Finding(Status.NOTE, name, "not installed; --transformer-impl local works", fix)


def _gpus() -> Finding:
    import torch

    built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding(Status.OK, "GPU", f"{len(names)} ({', '.join(sorted(set(names)))}), {built}")
    return Finding(Status.NOTE, "GPU", f"none found, {built}", "train on CPU ranks with --cpu")


def _megatron_training() -> Finding:
    subject = "megatron.training"
    core = importlib.util.find_spec("megatron.core")
    spec = importlib.util.find_spec(subject)
    if spec is None or spec.origin is None:
        fix = f"pip install 'megatron-core{releases.VERSIONS}', or put a checkout on PYTHONPATH"
        return Finding(Status.FAIL, subject, "not found", fix)
    importlib.import_module(subject)
    from megatron.core.package_info import __version__ as version

    root = Path(spec.origin).parents[2]
    if core is not None and core.origin is not None and Path(core.origin).parents[2] != root:
        text = f"{root} has megatron.training, {Path(core.origin).parents[2]} megatron.core"
        fix = "keep one Megatron on the path: remove the checkout from PYTHONPATH"
        return Finding(Status.FAIL, subject, text, fix)
    return Finding(Status.OK, subject, f"{version} in {root}")


def _dataset_helpers() -> Finding:
    subject = "dataset helpers"
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        return Finding(Status.OK, subject, "compiled")
    if Path(utils.__file__).with_name("Makefile").exists():
        text = "not compiled; Megatron compiles them at start-up, with make, g++ and pybind11"
        return Finding(Status.NOTE, subject, text, "pip install pybind11 if that fails")
    fix = "pip install --force-reinstall --no-deps megatron-core (its wheel has them)"
    return Finding(Status.FAIL, subject, "not compiled", fix)


def _hooks() -> Finding:
    from megatron_async import hooks

    version = releases.current()
    names = [
        f"{hook.target.replace(':', '.')}:{hook.attribute}"
        for hook in hooks.HOOKS
        if is_for(hook, version)
    ]
    found = _attributes("hooks", names, "not installed in this process, as it should be")
    if found.status is not Status.OK or not hooks.installed():
        return found
    if not hooks.in_source():
        return _attributes("hooks", names, "installed")
    try:
        hooks.check_source()
    except RuntimeError as error:
        fix = "apply the patch for this release, see patches/README.md"
        return Finding(Status.FAIL, "hooks", str(error), fix)
    return _attributes("hooks", names, "called by Megatron's source, which was patched")


def _cpu_backend() -> Finding:
    from megatron_async import cpu_backend

    installed = {"torch": metadata.version("torch"), "megatron": metadata.version("megatron-core")}
    names = []
    for row in cpu_backend.replacements():
        holder = row.target.replace(":", ".")
        version = installed[holder.partition(".")[0]]
        if not row.optional and is_for(row, version):
            names.append(f"{holder}:{row.attribute}")
    return _attributes("CPU backend", names, "used with --cpu only")


def _attributes(subject: str, names: Sequence[str], state: str) -> Finding:
    missing = [name.replace(":", ".") for name in names if not _exists(name)]
    if missing:
        text = f"{len(missing)} of {len(names)} attributes are not there: {', '.join(missing)}"
        fix = "install a supported version of megatron-core and torch, see above"
        return Finding(Status.FAIL, subject, text, fix)
    return Finding(Status.OK, subject, f"all {len(names)} attributes found; {state}")


def _exists(name: str) -> bool:
    """Whether ``module.Class:attribute`` can be looked up; a class may be missing as well."""
    holder_path, _, attribute = name.partition(":")
    holder, rest = _import_longest(holder_path)
    for part in [*rest, *attribute.split(".")]:
        if not hasattr(holder, part):
            return False
        holder = getattr(holder, part)
    return True


def _import_longest(path: str) -> tuple[Any, list[str]]:
    """Import the longest part of a dotted path that is a module; return it and the rest."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:length])), parts[length:]
        except ModuleNotFoundError:
            continue
    return object(), parts


def _connections() -> Finding:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = os.environ.get(name)
    if value == "1":
        return Finding(Status.OK, "environment", f"{name}=1")
    text = f"{name} is {value or 'not set'}"
    fix = "export it as 1 for tensor or context parallelism on GPUs before Blackwell"
    return Finding(Status.NOTE, "environment", text, fix)
