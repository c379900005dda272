"""The files that a training command names, as far as they are on this machine.

What is not here may be where the command will run: that is a note. What is here and cannot be used
is a problem, before a run that would find out after minutes in the queue.
"""

import argparse
import ast
import contextlib
import os
import struct
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["NamedFiles", "exists", "look_at_files", "look_at_script"]

_DATA: Final = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_LISTS: Final = ("data_args_path", "per_split_data_args_path")
_VOCABULARIES: Final = ("vocab_file", "merge_file")
_FOLDERS: Final = ("save", "tensorboard_dir", "data_cache_path", "log_fingerprints", "log_enqueues")
_TRACKER: Final = "latest_checkpointed_iteration.txt"
_HEADER: Final = 9 + 8 + 1 + 8 + 8
"""Bytes ahead of the lengths: magic, version, type, numbers of sequences and documents."""


@dataclass(frozen=True)
class NamedFiles:
    """What was found, a sentence each.

    Attributes:
        problems: of files that are here and that the run would end at.
        notes: on what is not here.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def exists(path: Path) -> bool:
    """Whether there is something, and it can be looked at."""
    try:
        return path.exists()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def look_at_script(script: Path) -> NamedFiles:
    """Look at the training script; of one that is not here, whoever asks may say more."""
    found = NamedFiles()
    if not exists(script):
        return found
    if script.is_dir():
        found.problems.append(f"{script} is a folder. Give the training script.")
        return found
    try:
        with tokenize.open(script) as file:
            text = file.read()
        if ast.parse(text).body:
            return found
        found.problems.append(f"{script} has no code in it. Give the training script.")
    except OSError as error:
        found.problems.append(f"{script} cannot be read: {error.strerror or error}.")
    except (SyntaxError, ValueError, RecursionError) as error:
        found.problems.append(f"{script} is no Python: {error}. Give the training script.")
    return found


def look_at_files(args: argparse.Namespace) -> NamedFiles:
    """Look at the data, the tokenizer's files, checkpoints and folders of output.

    Args:
        args: Megatron's, as its parser leaves them.
    """
    found = NamedFiles()
    data = False
    for name in _DATA:
        given = getattr(args, name, None)
        data = data or bool(given)
        with _problems_of(name, found):
            for prefix in _prefixes(given):
                _look_at_data(name, prefix, found)
    for name in (*_LISTS, *_VOCABULARIES):
        given = getattr(args, name, None)
        data = data or (name in _LISTS and given is not None)
        if given is not None and not _is_remote(given):
            _look_at_file(name, Path(given), found)
    if not data and not getattr(args, "mock_data", False):
        found.notes.append("No --data-path is given: Megatron's script trains on mock data then.")
    load = getattr(args, "load", None)
    if load is not None and not _is_remote(load):
        with _problems_of("load", found):
            _look_at_checkpoint(Path(load), found)
    for name in _FOLDERS:
        given = getattr(args, name, None)
        if isinstance(given, str | Path) and not _is_remote(given):
            with _problems_of(name, found):
                _look_at_folder(name, Path(given), found)
    return found


@contextlib.contextmanager
def _problems_of(name: str, found: NamedFiles) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, AssertionError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "its values make no sense"
        found.problems.append(f"{_flag(name)}: {reason}.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _is_remote(path: str | Path) -> bool:
    return "://" in str(path)


def _prefixes(given: list[str] | None) -> list[str]:
    """Without their weights."""
    from megatron.core.datasets.utils import get_blend_from_list

    blend = get_blend_from_list(given) if given else None
    return [] if blend is None else [each for each in blend[0] if not _is_remote(each)]


def _look_at_data(name: str, prefix: str, found: NamedFiles) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    there = [path for path in (index, tokens) if exists(path)]
    if not there and prefix.endswith((".bin", ".idx")) and exists(Path(prefix)):
        found.problems.append(
            f"{_flag(name)} {prefix}: Megatron adds the ending itself. Give {prefix[:-4]}."
        )
    elif not there:
        found.notes.append(f"{_flag(name)}: {index} is not here, and the data was not looked at.")
    elif len(there) == 1:
        missing = tokens if there == [index] else index
        found.problems.append(
            f"{_flag(name)} {prefix}: {there[0]} is there and {missing} is not. Write both anew "
            "(megatron-async data)."
        )
    elif why := _broken(index, tokens):
        found.problems.append(
            f"{_flag(name)} {prefix}: {why}. Write both anew, or copy them again."
        )


def _broken(index: Path, tokens: Path) -> str:
    """Why Megatron cannot read a dataset (IndexedDataset in megatron/core/datasets); or nothing."""
    from megatron.core.datasets.indexed_dataset import DType

    size = tokens.stat().st_size
    with index.open("rb") as file:
        header = file.read(_HEADER)
        if len(header) < _HEADER or not header.startswith(b"MMIDIDX\0\0"):
            return f"{index} is no index of Megatron's"
        _, code, sequences, documents = struct.unpack("<QBQQ", header[9:])
        wanted = _HEADER + sequences * (4 + 8) + documents * 8
        if index.stat().st_size < wanted:
            return f"{index} is cut off"
        if not sequences:
            return f"{index} has no documents"
        file.seek(_HEADER + 4 * (sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER + 4 * sequences + 8 * (sequences - 1))
        (begin,) = struct.unpack("<q", file.read(8))
    try:
        end = begin + length * DType.size(code)
    except (ValueError, KeyError):
        return f"{index} has tokens of an unknown type ({code})"
    return f"{tokens} has {size} bytes and not the {end} of its index" if size < end else ""


def _look_at_file(name: str, path: Path, found: NamedFiles) -> None:
    if not exists(path):
        found.notes.append(f"{_flag(name)}: {path} is not here, and was not looked at.")
    elif not path.is_file():
        found.problems.append(f"{_flag(name)}: {path} is no file.")
    elif not os.access(path, os.R_OK):
        found.problems.append(f"{_flag(name)}: {path} may not be read.")
    elif not path.stat().st_size:
        found.problems.append(f"{_flag(name)}: {path} is empty.")


def _look_at_checkpoint(path: Path, found: NamedFiles) -> None:
    """A folder that is not there, or has nothing in it, begins a run."""
    if not exists(path):
        return
    if not path.is_dir():
        found.problems.append(f"--load: {path} is no folder.")
        return
    tracker = path / _TRACKER
    if not exists(tracker):
        return
    text = tracker.read_text(errors="replace").strip()
    if text != "release" and not text.isdecimal():
        found.problems.append(
            f"--load: {tracker} holds {text[:40]!r} in place of an iteration. Write the number of "
            "the newest complete checkpoint there."
        )


def _look_at_folder(name: str, path: Path, found: NamedFiles) -> None:
    """One that is made, with those above it."""
    above = next(each for each in (path, *path.parents) if exists(each))
    if not above.is_dir():
        found.problems.append(f"{_flag(name)}: {above} is a file, so no folder can be made there.")
    elif not os.access(above, os.W_OK | os.X_OK):
        found.problems.append(f"{_flag(name)}: {above} may not be written to.")
