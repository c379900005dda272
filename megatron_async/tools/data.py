"""``megatron-async data``: text files to Megatron's .bin/.idx, through Megatron's own builder.

A text file is one document; a ``.jsonl`` file has one document per line. Every document ends with
the tokenizer's end-of-document token. Neither a GPU nor ``torch.distributed`` is needed.

The tokenizer ``bytes`` has the 256 bytes as its tokens. Training reads it as Megatron's
``NullTokenizer`` with ``--vocab-size 256``, whose end-of-document token is 255: a byte that UTF-8
never uses. Where a file that is not UTF-8 contains it, U+FFFD is written instead.
"""

import argparse
import contextlib
import glob
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_async.megatron.training import add_tokenizer_arguments
from megatron_async.tools.progress import ProgressBar

__all__ = [
    "BYTE_TOKENIZER_FLAGS",
    "ByteTokenizer",
    "DataError",
    "Input",
    "MegatronTokenizer",
    "Summary",
    "Tokenizer",
    "find_inputs",
    "main",
    "read_documents",
    "split_flags",
    "write_dataset",
]

BYTE_TOKENIZER_FLAGS = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "256")
"""Megatron's flags for a model that trains on the tokens of :class:`ByteTokenizer`."""

_END_OF_DOCUMENT = 255
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}".encode()


class DataError(Exception):
    """Something the user can mend; the message says what."""


class Tokenizer(Protocol):
    """What :func:`write_dataset` needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def training_flags(self) -> tuple[str, ...]:
        """Megatron's flags that choose the same tokenizer in training."""

    def encode(self, document: bytes) -> NDArray[np.integer[Any]]:
        """Return the token ids of a document, shape (tokens,), end-of-document token included.

        Raises:
            DataError: the document cannot be tokenized.
        """


class ByteTokenizer:
    """256 tokens, one per byte; token 255 ends a document."""

    vocab_size = 256
    training_flags = BYTE_TOKENIZER_FLAGS

    def __init__(self) -> None:
        self.replaced = 0
        """How many bytes of value 255 were replaced by U+FFFD so far."""

    def encode(self, document: bytes) -> NDArray[np.uint8]:
        """Return the bytes of a document, shape (tokens,), with token 255 at the end."""
        end = bytes([_END_OF_DOCUMENT])
        count = document.count(end)
        if count:
            self.replaced += count
            document = document.replace(end, _REPLACEMENT)
        return np.frombuffer(document + end, dtype=np.uint8)


class MegatronTokenizer:
    """One of Megatron's own tokenizers, chosen by Megatron's own flags.

    Args:
        tokenizer_type: a value of Megatron's ``--tokenizer-type``.
        flags: further tokenizer flags of Megatron, such as ``--tokenizer-model PATH``.

    Raises:
        DataError: the type or a flag is unknown, or the tokenizer cannot be made.
    """

    def __init__(self, tokenizer_type: str, flags: Sequence[str] = ()) -> None:
        parser = argparse.ArgumentParser(prog="megatron-async data", add_help=False)
        with _quiet_imports():
            from megatron.core.tokenizers.utils import build_tokenizer as megatron_tokenizers

            add_tokenizer_arguments(parser)
        if tokenizer_type not in megatron_tokenizers.SUPPORTED_TOKENIZERS:
            known = ", ".join(["bytes", *megatron_tokenizers.SUPPORTED_TOKENIZERS])
            raise DataError(f"--tokenizer {tokenizer_type} is unknown; choose one of {known}.")
        self.training_flags = ("--tokenizer-type", tokenizer_type, *flags)
        args, unknown = parser.parse_known_args(self.training_flags)
        if unknown:
            raise _unknown_flags(unknown)
        args.rank, args.pad_vocab_size = 0, False
        try:
            self._tokenizer = megatron_tokenizers.build_tokenizer(args)
            self.vocab_size = int(self._tokenizer.vocab_size)
            self._eod = int(self._tokenizer.eod)
        except Exception as error:  # whatever the tokenizer's library raises
            raise DataError(
                f"Megatron cannot build the tokenizer of {' '.join(self.training_flags)}: "
                f"{type(error).__name__}: {error}. Check its flags (--tokenizer-model, "
                "--vocab-file, --merge-file, ...) and that its library is installed "
                "(pip install 'megatron-async[tokenizers]')."
            ) from error

    def encode(self, document: bytes) -> NDArray[np.int64]:
        """Return the token ids of a UTF-8 document, shape (tokens,), end of document included."""
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"it is not UTF-8 ({error}); convert it, or leave it out") from error
        try:
            ids = self._tokenizer.tokenize(text)
        except Exception as error:
            raise DataError(f"the tokenizer failed: {type(error).__name__}: {error}") from error
        return np.array([*ids, self._eod], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Input:
    """A file to read.

    Attributes:
        path: where it is.
        size: in bytes.
        named: whether the user named this very file, so that it must not be empty.
    """

    path: Path
    size: int
    named: bool


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was written.

    Attributes:
        prefix: path of the .bin and .idx files without their suffix.
        documents: how many.
        tokens: how many, end-of-document tokens included.
        bytes_read: size of the inputs.
        bytes_written: size of the .bin file.
        empty: files and lines without text that were left out.
    """

    prefix: Path
    documents: int
    tokens: int
    bytes_read: int
    bytes_written: int
    empty: int


def find_inputs(patterns: Iterable[str]) -> list[Input]:
    """Return the files that the patterns stand for, each once, in a stable order.

    A directory stands for every file below it, except hidden ones, ``__pycache__``, and files that
    are not text (a zero byte among the first 8192). In a glob, ``**`` stands for any number of
    directories.

    Raises:
        DataError: a pattern stands for no file, or a file that was named is empty.
    """
    found: dict[Path, Input] = {}
    for pattern in patterns:
        named = Path(pattern)
        if named.is_dir():
            visible = [path for path in sorted(named.rglob("*")) if _is_visible(path, named)]
            paths = [path for path in visible if not _is_binary(path)]
        elif named.exists():
            paths = [named]
        elif glob.has_magic(pattern):
            # Path.glob takes no absolute pattern.
            matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
            paths = [Path(match) for match in matches]
        else:
            raise DataError(f"--input {pattern}: there is no such file or directory.")
        paths = [path for path in paths if path.is_file()]
        if not paths:
            raise DataError(f"--input {pattern}: it stands for no file.")
        for path in paths:
            source = Input(path=path, size=path.stat().st_size, named=path == named)
            if source.named and source.size == 0:
                raise DataError(f"--input {pattern}: the file is empty.")
            found.setdefault(path.resolve(), source)
    if not found:
        raise DataError("--input names no file.")
    return list(found.values())


def read_documents(path: Path, *, json_key: str = "text") -> Iterator[bytes]:
    """Yield the documents of a file: its lines' ``json_key`` for .jsonl, else the whole file.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object with that key.
    """
    try:
        if path.suffix != ".jsonl":
            yield path.read_bytes()
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_text(line, json_key, where=f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def write_dataset(
    inputs: Sequence[Input],
    prefix: Path,
    *,
    tokenizer: Tokenizer,
    json_key: str = "text",
    overwrite: bool = False,
    label: str = "Tokenizing",
) -> Summary:
    """Write ``prefix.bin`` and ``prefix.idx`` and return what is in them.

    The tokens are stored in 2 bytes each where the vocabulary allows it, else in 4. Both files
    appear when they are complete; until then, and after an error, what was there before stays.

    Raises:
        DataError: the output cannot be written, or no document has any text.
    """
    with _quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    targets = [Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx")]
    _check_targets(targets, overwrite=overwrite)
    # Beside the targets, so that the last step is a rename.
    partial = [target.with_name(f"{target.name}.partial-{os.getpid()}") for target in targets]
    total = sum(source.size for source in inputs)
    documents = tokens = empty = read = 0
    started = time.monotonic()
    try:
        dtype = DType.optimal_dtype(tokenizer.vocab_size)
        builder = IndexedDatasetBuilder(str(partial[0]), dtype=dtype)
        with ProgressBar(label, total=total) as bar:
            for source in inputs:
                before = documents
                seen = read
                for document in read_documents(source.path, json_key=json_key):
                    if not document:
                        continue
                    try:
                        ids = tokenizer.encode(document)
                    except DataError as error:
                        raise DataError(f"{source.path}: {error}.") from error
                    builder.add_document(ids, [len(ids)])
                    documents += 1
                    tokens += len(ids)
                    # A .jsonl file holds more than its texts, so this lags a little until its end.
                    seen = min(seen + len(document), read + source.size)
                    bar.update(seen, _rate(seen, total, started))
                empty += documents == before
                read += source.size
                bar.update(read, _rate(read, total, started))
        builder.finalize(str(partial[1]))
        if not documents:
            raise DataError("no input has any text: nothing to write.")
        written = partial[0].stat().st_size
        for source_path, target in zip(partial, targets, strict=True):
            source_path.replace(target)
    except OSError as error:
        raise DataError(f"{prefix} cannot be written: {error.strerror or error}.") from error
    finally:
        for path in partial:
            path.unlink(missing_ok=True)
    return Summary(
        prefix=prefix,
        documents=documents,
        tokens=tokens,
        bytes_read=total,
        bytes_written=written,
        empty=empty,
    )


def main(argv: Sequence[str]) -> int:
    """Run ``megatron-async data`` with these arguments and return its exit status."""
    parser = _make_parser()
    args, rest = parser.parse_known_args(argv)
    try:
        tokenizer: Tokenizer
        if args.tokenizer == "bytes":
            if rest:
                raise _unknown_flags(rest)
            tokenizer = ByteTokenizer()
        else:
            tokenizer = MegatronTokenizer(args.tokenizer, rest)
        prefix = Path(args.output.removesuffix(".bin").removesuffix(".idx"))
        inputs = find_inputs(args.input)
        summary = write_dataset(
            inputs,
            prefix,
            tokenizer=tokenizer,
            json_key=args.json_key,
            overwrite=args.overwrite,
        )
    except DataError as error:
        print(f"megatron-async data: {error}", file=sys.stderr)
        return 1
    left_out = f", {summary.empty} without text left out" if summary.empty else ""
    files = "file" if len(inputs) == 1 else "files"
    print(f"documents  {summary.documents:,}")
    print(f"tokens     {summary.tokens:,} (vocabulary {tokenizer.vocab_size:,})")
    print(f"bytes      {summary.bytes_read:,} read from {len(inputs):,} {files}{left_out}")
    print(f"written    {prefix}.bin ({summary.bytes_written:,} bytes), {prefix}.idx")
    if isinstance(tokenizer, ByteTokenizer) and tokenizer.replaced:
        print(f"replaced   {tokenizer.replaced:,} bytes 255, which are not UTF-8, by U+FFFD")
    flags = [*tokenizer.training_flags, *split_flags(summary.documents)]
    print(f"train with --data-path {prefix} {' '.join(flags)}")
    return 0


def split_flags(documents: int) -> tuple[str, ...]:
    """Return the flags that split so few documents into training, validation and test sets.

    Megatron splits by whole documents, 969 to 30 to 1 by default, and looks for ever for samples in
    a set that gets none (``_get_num_epochs`` in megatron/core/datasets/gpt_dataset.py).
    """
    if documents >= 1000:
        return ()
    if documents >= 10:
        return ("--split", "90,10,0")
    return ("--split", "50,50,0") if documents > 1 else ("--split", "1,0,0", "--eval-iters", "0")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async data",
        description="Write text as Megatron's .bin/.idx files. Tokenizer flags of Megatron, such "
        "as --tokenizer-model PATH, may follow.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, directories or globs; a .jsonl file has a document per line, any other file "
        "is one document",
    )
    parser.add_argument(
        "--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.idx"
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="TYPE",
        help="bytes (the default: 256 tokens), or a value of Megatron's --tokenizer-type",
    )
    parser.add_argument(
        "--json-key", default="text", metavar="KEY", help="the text's key in .jsonl files"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")
    return parser


def _unknown_flags(flags: Sequence[str]) -> DataError:
    return DataError(f"unknown arguments: {' '.join(flags)}. See megatron-async data --help.")


def _is_visible(path: Path, directory: Path) -> bool:
    parts = path.relative_to(directory).parts
    return not any(part.startswith(".") or part == "__pycache__" for part in parts)


def _is_binary(path: Path) -> bool:
    """Whether there is a zero byte near the start, as no text has."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError:
        return False  # whoever reads it names it


def _json_text(line: bytes, key: str, *, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no text under "{key}"; name the key with --json-key.')
    # A lone surrogate escape is valid JSON and not valid UTF-8.
    return text.encode("utf-8", errors="replace")


def _check_targets(targets: Sequence[Path], *, overwrite: bool) -> None:
    folder = targets[0].parent
    if not folder.is_dir():
        raise DataError(f"--output: there is no folder {folder}; make it with mkdir -p {folder}.")
    if not os.access(folder, os.W_OK):
        raise DataError(f"--output: the folder {folder} is not writable.")
    existing = [str(target) for target in targets if target.exists()]
    if existing and not overwrite:
        raise DataError(f"--output: {' and '.join(existing)} exist; pass --overwrite to replace.")


def _rate(done: int, total: int, started: float) -> str:
    rate = done / max(time.monotonic() - started, 1e-9)
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Leave out what Megatron says on import about libraries that writing data does not need."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
