"""Documents to Megatron's .bin/.idx, by many processes, and resumable.

One process reads the inputs and cuts them into pieces. Others turn pieces into tokens, in any
order; the first writes the results in the order of the pieces. So the output does not depend on how
many there are, to the byte.

Until it is complete the output lies in the folder ``PREFIX.partial``: the tokens, the lengths of
the documents, and how far the work has come, written every few seconds after the other two have
reached the disk. A run that finds such a record, made from the same inputs with the same settings,
cuts both files to the lengths in it and goes on from there.

The .bin file is the documents' tokens one after the other, and the .idx is written by Megatron's
own builder (megatron/core/datasets/indexed_dataset.py).
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_async.tools.documents import (
    DataError,
    Input,
    Record,
    check_libraries,
    document_of,
    read_records,
)
from megatron_async.tools.progress import ProgressBar
from megatron_async.tools.tokenizing import Tokenizer, quiet_imports

__all__ = ["Summary", "write_dataset"]

_FORMAT = 1
_COMMIT_INTERVAL_S = 10.0
_PIECE_RECORDS = 512
_PIECE_BYTES = 1 << 20


class _Busy(DataError):
    """Another process writes to the same place."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What was written.

    Attributes:
        prefix: path of the .bin and .idx files without their suffix.
        documents: how many.
        tokens: how many, end-of-document tokens included.
        bytes_read: size of the inputs.
        bytes_written: size of the .bin file.
        empty: inputs without any text.
        replaced: bytes that the tokenizer replaced.
    """

    prefix: Path
    documents: int
    tokens: int
    bytes_read: int
    bytes_written: int
    empty: int
    replaced: int


@dataclass(kw_only=True)
class _Progress:
    """How far the work has come.

    Attributes:
        identity: hash of the inputs and settings.
        source: index of the input that is being read.
        record: number of its last record that was written; 0 if none was.
        in_source: documents of this input so far.
        documents: in all, which is the length of the file of lengths.
        tokens: in all, which is the length of the file of tokens.
        empty: inputs without any text.
        replaced: bytes that the tokenizer replaced.
        complete: whether .bin and .idx are complete and only have to be moved.
    """

    identity: str
    source: int = 0
    record: int = 0
    in_source: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    replaced: int = 0
    complete: bool = False


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A few records of one input, the last ones of it if ``last``."""

    source: int
    path: str
    records: tuple[Record, ...]
    last: bool


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """What became of a piece: the tokens as bytes, and how many each document has."""

    tokens: bytes
    lengths: NDArray[np.int32]
    replaced: int


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a process needs to turn pieces into tokens."""

    tokenizer: Tokenizer
    json_key: str
    dtype: str

    def __call__(self, piece: _Piece) -> _Tokens:
        """Turn a piece into tokens.

        Raises:
            DataError: a record has no text, or the tokenizer failed.
        """
        before = self.tokenizer.replaced
        parts: list[bytes] = []
        lengths: list[int] = []
        for record in piece.records:
            document = document_of(record, path=piece.path, json_key=self.json_key)
            if not document:
                continue
            try:
                ids = self.tokenizer.encode(document)
            except DataError as error:
                raise DataError(f"{record.place(piece.path)}: {error}.") from error
            parts.append(np.asarray(ids, dtype=self.dtype).tobytes())
            lengths.append(len(ids))
        return _Tokens(
            tokens=b"".join(parts),
            lengths=np.array(lengths, dtype=np.int32),
            replaced=self.tokenizer.replaced - before,
        )


def write_dataset(
    inputs: Sequence[Input],
    prefix: Path,
    *,
    tokenizer: Tokenizer,
    json_key: str = "text",
    overwrite: bool = False,
    workers: int = 1,
    label: str = "Tokenizing",
    commit_interval_s: float = _COMMIT_INTERVAL_S,
) -> Summary:
    """Write ``prefix.bin`` and ``prefix.idx`` and return what is in them.

    The tokens are stored in 2 bytes each where the vocabulary allows it, else in 4. Both files
    appear when they are complete; until then, and after an error, what was there before stays. A
    call that was killed is gone on with by a call with the same arguments; ``workers`` may differ.
    An input counts as the same if its path, size and time of change are.

    Args:
        inputs: the files, in the order of their documents.
        prefix: path of the output without suffix.
        tokenizer: with more than one worker it must be possible to pickle it.
        json_key: the text's key in lines of JSON, or its column in a Parquet file.
        overwrite: whether files that are there already may be replaced.
        workers: how many processes tokenize; 1 does all in this process.
        label: for the progress bar.
        commit_interval_s: at most so many seconds of work are lost when it is killed.

    Raises:
        DataError: an input or the output cannot be read or written, or no document has any text.
    """
    with quiet_imports():
        from megatron.core.datasets.indexed_dataset import DType
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    work = _Work(tokenizer=tokenizer, json_key=json_key, dtype=np.dtype(dtype).str)
    identity = _identity(inputs, work)
    targets = [Path(f"{prefix}.{suffix}") for suffix in ("bin", "idx")]
    # Beside the targets, so that the last step is a rename.
    folder = Path(f"{prefix}.partial")
    saved = _read_progress(folder, identity)
    # Of a complete output one file may have been put in its place already.
    _check_targets(targets, overwrite=overwrite or (saved is not None and saved.complete))
    check_libraries(inputs)
    try:
        with _locked(folder):
            output = _Output(folder, identity=identity, dtype=dtype)
            if not output.progress.complete:
                _write(inputs, output, work, workers, label, commit_interval_s)
            progress = output.progress
            output.move(targets)
        shutil.rmtree(folder)
    except OSError as error:
        raise DataError(
            f"{prefix} cannot be written: {error.strerror or error}.{_kept(folder)}"
        ) from error
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenizes has died, perhaps for want of memory; use fewer "
            f"--workers.{_kept(folder)}"
        ) from error
    except _Busy:
        raise
    except DataError:
        # The same documents would fail again.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except KeyboardInterrupt:
        _kept(folder)
        raise
    return Summary(
        prefix=prefix,
        documents=progress.documents,
        tokens=progress.tokens,
        bytes_read=sum(source.size for source in inputs),
        bytes_written=progress.tokens * np.dtype(dtype).itemsize,
        empty=progress.empty,
        replaced=progress.replaced,
    )


class _Output:
    """The files of an output that is not complete.

    Args:
        folder: where they lie.
        identity: of the inputs and settings; what another has left is dropped.
        dtype: of a token.
    """

    def __init__(self, folder: Path, *, identity: str, dtype: Any) -> None:
        self._folder = folder
        self._dtype = dtype
        self._paths = [folder / name for name in ("bin", "lengths")]
        self._record = folder / "progress.json"
        saved = _read_progress(folder, identity)
        self.progress = _Progress(identity=identity) if saved is None else saved
        if self.progress.complete:
            return
        if saved is None and self._record.exists():
            print(
                f"What another command has left in {folder} is not of these inputs and settings: "
                "starting afresh.",
                file=sys.stderr,
            )
            self._record.unlink()
        sizes = (self.progress.tokens * np.dtype(dtype).itemsize, self.progress.documents * 4)
        self._files: list[IO[bytes]] = []
        for path, size in zip(self._paths, sizes, strict=True):
            path.touch()
            file = path.open("r+b")
            file.truncate(size)
            file.seek(size)
            self._files.append(file)

    def append(self, piece: _Piece, made: _Tokens) -> None:
        """Write what became of the next piece."""
        tokens, lengths = self._files
        tokens.write(made.tokens)
        lengths.write(made.lengths.tobytes())
        now = self.progress
        now.documents += len(made.lengths)
        now.in_source += len(made.lengths)
        now.tokens += int(made.lengths.sum(dtype=np.int64))
        now.replaced += made.replaced
        if piece.records:
            now.record = piece.records[-1].number
        if piece.last:
            now.empty += not now.in_source
            now.source, now.record, now.in_source = piece.source + 1, 0, 0

    def commit(self) -> None:
        """Let a later run go on from here."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self._write_record()

    def finish(self) -> None:
        """Write the index.

        Raises:
            DataError: there is no document.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if not self.progress.documents:
            raise DataError("no input has any text: nothing to write.")
        # The builder would empty the .bin; it writes none of it here.
        builder = IndexedDatasetBuilder(os.devnull, dtype=self._dtype)
        builder.sequence_lengths = np.fromfile(self._paths[1], dtype=np.int32)
        builder.document_indices = np.arange(self.progress.documents + 1, dtype=np.int64)
        builder.finalize(str(self._folder / "idx"))
        self.progress.complete = True
        self._write_record()

    def move(self, targets: Sequence[Path]) -> None:
        """Put both files in their place; one may be there since a run that was killed."""
        for target in targets:
            path = self._folder / target.suffix.removeprefix(".")
            if path.exists():
                path.replace(target)

    def close(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def _write_record(self) -> None:
        new = self._record.with_suffix(".new")
        with new.open("w") as file:
            json.dump({"format": _FORMAT, **asdict(self.progress)}, file)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._record)


def _write(
    inputs: Sequence[Input],
    output: _Output,
    work: _Work,
    workers: int,
    label: str,
    commit_interval_s: float,
) -> None:
    offsets = np.cumsum([0, *(source.size for source in inputs)]).tolist()
    total = offsets[-1]
    started = committed = time.monotonic()
    first = None
    try:
        with (
            ProgressBar(label, total=total) as bar,
            contextlib.closing(_results(_pieces(inputs, output.progress, work), work, workers)) as (
                results
            ),
        ):
            for piece, made in results:
                output.append(piece, made)
                at = piece.records[-1].position if piece.records and not piece.last else None
                seen = offsets[piece.source + 1] if at is None else offsets[piece.source] + at
                first = seen if first is None else first
                bar.update(seen, _rate(seen, seen - first, total, started))
                if time.monotonic() - committed >= commit_interval_s:
                    output.commit()
                    committed = time.monotonic()
        output.finish()
    finally:
        output.close()


def _pieces(inputs: Sequence[Input], progress: _Progress, work: _Work) -> Iterator[_Piece]:
    """Yield what there is to do from where ``progress`` stands, at least one piece an input."""
    start, after = progress.source, progress.record
    for index, source in enumerate(inputs[start:], start=start):
        records: list[Record] = []
        size = 0
        path = str(source.path)
        skip = after if index == start else 0
        for record in read_records(source.path, json_key=work.json_key, after=skip):
            if len(records) >= _PIECE_RECORDS or size >= _PIECE_BYTES:
                yield _Piece(source=index, path=path, records=tuple(records), last=False)
                records, size = [], 0
            records.append(record)
            size += len(record.content)
        yield _Piece(source=index, path=path, records=tuple(records), last=True)


def _results(
    pieces: Iterator[_Piece], work: _Work, workers: int
) -> Generator[tuple[_Piece, _Tokens]]:
    """Yield what becomes of the pieces, in their order."""
    if workers == 1:
        for piece in pieces:
            yield piece, work(piece)
        return
    # Not forked: torch and the tokenizers' libraries may have threads.
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(work,)
    )
    waiting: deque[tuple[_Piece, Future[_Tokens]]] = deque()
    try:
        for piece in pieces:
            waiting.append((piece, pool.submit(_do, piece)))
            # As many more as keep all busy while the first of them takes long.
            if len(waiting) >= 4 * workers:
                first, made = waiting.popleft()
                yield first, made.result()
        while waiting:
            first, made = waiting.popleft()
            yield first, made.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_work: _Work | None = None
"""Of a process that tokenizes."""


def _start_worker(work: _Work) -> None:
    global _work
    _work = work
    # Ctrl-C is the first process's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A process that waits for work does not notice that nobody is left to give it any."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(piece: _Piece) -> _Tokens:
    assert _work is not None
    return _work(piece)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make the folder, and keep others from it."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _Busy(
                f"--output: another process is writing to {folder}; wait for it, or choose another."
            ) from error
        except OSError:
            pass  # A file system without locks.
        yield


def _read_progress(folder: Path, identity: str) -> _Progress | None:
    """Return how far an earlier run of this identity came; None if there is none."""
    try:
        saved = json.loads((folder / "progress.json").read_text())
        if saved.pop("format") == _FORMAT and saved["identity"] == identity:
            return _Progress(**saved)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _identity(inputs: Sequence[Input], work: _Work) -> str:
    files = [
        (str(source.path.resolve()), status.st_size, status.st_mtime_ns)
        for source in inputs
        for status in [source.path.stat()]
    ]
    settings = [files, work.tokenizer.training_flags, work.json_key, work.dtype]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _kept(folder: Path) -> str:
    """Remove what no later run can use, and say so where there is something."""
    if (folder / "progress.json").exists():
        return " What is done is kept: the same command goes on from there."
    shutil.rmtree(folder, ignore_errors=True)
    return ""


def _check_targets(targets: Sequence[Path], *, overwrite: bool) -> None:
    folder = targets[0].parent
    if not folder.is_dir():
        raise DataError(f"--output: there is no folder {folder}; make it with mkdir -p {folder}.")
    if not os.access(folder, os.W_OK):
        raise DataError(f"--output: the folder {folder} is not writable.")
    existing = [str(target) for target in targets if target.exists()]
    if existing and not overwrite:
        raise DataError(f"--output: {' and '.join(existing)} exist; pass --overwrite to replace.")


def _rate(seen: int, done: int, total: int, started: float) -> str:
    rate = done / max(time.monotonic() - started, 1e-9)
    return f"{seen / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
