"""The documents of text files: which files there are, and what is in them.

A ``.jsonl`` file, plain or compressed (``.jsonl.gz``, ``.jsonl.zst``), has a document per line,
a ``.parquet`` file one per row; any other file is one document. Reading gives *records*, which are
cheap to read and are made into documents elsewhere, by as many processes as there are.

zstandard and pyarrow are needed for ``.zst`` and ``.parquet`` only (``pip install
'megatron-async[data]'``).
"""

import glob
import gzip
import importlib
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "FORMATS",
    "DataError",
    "Input",
    "Record",
    "check_libraries",
    "document_of",
    "find_inputs",
    "read_documents",
    "read_records",
]

FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Endings of files with many documents."""

_READ = 1 << 20
_ROWS = 1024


class DataError(Exception):
    """Something the user can mend; the message says what."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A line, a row or a whole file.

    Attributes:
        number: of the line or row, counted from 1; 0 for a whole file.
        content: the line as it is, or the text in UTF-8.
        is_json: whether the content is a line of JSON.
        position: how far into the file, in bytes, reading it has come.
    """

    number: int
    content: bytes
    is_json: bool
    position: int

    def place(self, path: str) -> str:
        """Where it stands, for messages."""
        if not self.number:
            return path
        return f"{path}, {'line' if self.is_json else 'row'} {self.number}"


def find_inputs(patterns: Iterable[str]) -> list[Input]:
    """Return the files that the patterns stand for, each once, in a stable order.

    A directory stands for every file below it, except hidden ones, ``__pycache__``, and files that
    are neither text (a zero byte among the first 8192) nor of :data:`FORMATS`. In a glob, ``**``
    stands for any number of directories.

    Raises:
        DataError: a pattern stands for no file, a file that was named is empty, or a folder may not
            be read.
    """
    found: dict[Path, Input] = {}
    for pattern in patterns:
        try:
            found |= {path: one for path, one in _found(pattern) if path not in found}
        except OSError as error:
            where = error.filename if error.filename not in (None, pattern) else "it"
            raise DataError(
                f"--input {pattern}: {where} cannot be read: {error.strerror or error}."
            ) from error
    if not found:
        raise DataError("--input names no file.")
    return list(found.values())


def _found(pattern: str) -> Iterator[tuple[Path, Input]]:
    named = Path(pattern)
    if named.is_dir():
        visible = [path for path in sorted(_below(named)) if _is_visible(path, named)]
        paths = [path for path in visible if _ending(path) or not _is_binary(path)]
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
        yield path.resolve(), source


def _below(folder: Path) -> Iterator[Path]:
    """The files below a folder; unlike Path.rglob it does not pass over folders that may not be
    read."""

    def refuse(error: OSError) -> None:
        raise error

    for above, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if _is_visible(Path(above, name), folder)]
        yield from (Path(above, name) for name in files)


def check_libraries(inputs: Iterable[Input]) -> None:
    """Look whether what the formats need is installed.

    Raises:
        DataError: it is not.
    """
    for source in inputs:
        library = {".jsonl.zst": "zstandard", ".parquet": "pyarrow"}.get(_ending(source.path))
        if library:
            _library(library, str(source.path))


def read_documents(path: Path, *, json_key: str = "text") -> Iterator[bytes]:
    """Yield the documents of a file, in UTF-8; a whole file as it is.

    Args:
        path: the file.
        json_key: the text's key in lines of JSON, or its column in a Parquet file.

    Raises:
        DataError: the file cannot be read, a line is not a JSON object with that key, there is no
            such column, or the library for the format is missing.
    """
    for record in read_records(path, json_key=json_key):
        yield document_of(record, path=str(path), json_key=json_key)


def document_of(record: Record, *, path: str, json_key: str) -> bytes:
    """Return a record's text in UTF-8, or a file's content as it is.

    Raises:
        DataError: the line is not a JSON object with that key.
    """
    if not record.is_json:
        return record.content
    return _json_text(record.content, json_key, where=record.place(path))


def read_records(path: Path, *, json_key: str = "text", after: int = 0) -> Iterator[Record]:
    """Yield the records of a file; blank lines are left out.

    Args:
        path: the file.
        json_key: the column of a Parquet file.
        after: number of the last line or row that is left out; 0 leaves out none.

    Raises:
        DataError: the file cannot be read, there is no such column, or the library for the format
            is missing.
    """
    ending = _ending(path)
    try:
        if ending == ".parquet":
            yield from _rows(path, json_key, after)
        elif ending:
            with path.open("rb") as file:
                for number, line in enumerate(_lines(file, ending), start=1):
                    if number > after and line.strip():
                        yield Record(
                            number=number, content=line, is_json=True, position=file.tell()
                        )
        else:
            content = path.read_bytes()
            yield Record(number=0, content=content, is_json=False, position=len(content))
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or cut off: {error}.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _lines(file: BinaryIO, ending: str) -> Iterator[bytes]:
    if ending == ".jsonl":
        return iter(file)
    if ending == ".jsonl.gz":
        return iter(gzip.GzipFile(fileobj=file))
    return _split_lines(_decompressed(file))


def _decompressed(file: BinaryIO) -> Iterator[bytes]:
    """Yield what is in the frames of a .zst file.

    zstandard's stream reader takes a file that is cut off for one that ends.
    """
    zstandard = _library("zstandard", file.name)
    # The largest window that files of `zstd --long` may ask for.
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while data := file.read(_READ):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            data = b""
            if frame.eof:
                data, frame = frame.unused_data, None
    if frame is not None:
        raise EOFError("its last frame is not complete")


def _split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, tail = chunk.split(b"\n")
        for line in whole:
            yield b"".join([*rest, line, b"\n"])
            rest.clear()
        rest.append(tail)
    last = b"".join(rest)
    if last:
        yield last


def _rows(path: Path, column: str, after: int) -> Iterator[Record]:
    pyarrow = _library("pyarrow", str(path))
    parquet = _library("pyarrow.parquet", str(path))
    try:
        with parquet.ParquetFile(path) as file:
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(
                    f'{path} has no column "{column}", only {names}; name it with --json-key.'
                )
            size, total = path.stat().st_size, max(file.metadata.num_rows, 1)
            # Whole groups of rows that were read before are not even decompressed.
            first, groups = 0, list(range(file.num_row_groups))
            while groups and first + file.metadata.row_group(groups[0]).num_rows <= after:
                first += file.metadata.row_group(groups.pop(0)).num_rows
            number = first
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[column]):
                for text in batch.column(0).to_pylist():
                    number += 1
                    if number <= after:
                        continue
                    if not isinstance(text, str):
                        raise DataError(
                            f'{path}, row {number} has no text in the column "{column}"; name '
                            "the column with --json-key."
                        )
                    yield Record(
                        number=number,
                        content=text.encode("utf-8", errors="replace"),
                        is_json=False,
                        position=size * number // total,
                    )
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {str(error).rstrip('.')}.") from error


def _library(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise DataError(
            f"{path} needs the package {name.partition('.')[0]}: pip install "
            "'megatron-async[data]'."
        ) from error


def _ending(path: Path) -> str:
    return next((ending for ending in reversed(FORMATS) if path.name.endswith(ending)), "")


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
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}.") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f'{where} has no text under "{key}"; name the key with --json-key.')
    # A lone surrogate escape is valid JSON and not valid UTF-8.
    return text.encode("utf-8", errors="replace")
