"""Formats, many processes, and a run that was killed, against Megatron's own builder."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_async.tools import dataset_writer, documents
from megatron_async.tools.data import ByteTokenizer, DataError, Input, main, read_documents
from megatron_async.tools.dataset_writer import Summary, write_dataset
from tests.support.gpt import REPOSITORY

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks

TEXTS = [f"document {index} " + "wörter " * (index % 7) for index in range(1300)]
"""More than two pieces."""


def as_jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_format(path: Path, texts: Sequence[str]) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(as_jsonl(texts)))
    elif path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        content = as_jsonl(texts)
        middle = len(content) // 2  # two frames, and a line across them
        path.write_bytes(
            zstandard.compress(content[:middle]) + zstandard.compress(content[middle:])
        )
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"id": list(range(len(texts))), "text": list(texts)})
        parquet.write_table(table, path, row_group_size=100)
    else:
        path.write_bytes(as_jsonl(texts))
    return path


def input_of(path: Path) -> Input:
    return Input(path=path, size=path.stat().st_size, named=True)


def written(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def by_megatron(prefix: Path, texts: Sequence[str]) -> tuple[bytes, bytes]:
    """Document by document with Megatron's own builder, in the way of its preprocess_data.py."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in texts:
        ids = [*text.encode(), 255]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return written(prefix)


@pytest.mark.parametrize("ending", documents.FORMATS)
def test_every_format_gives_megatrons_files(ending: str, tmp_path: Path) -> None:
    path = write_format(tmp_path / f"corpus{ending}", TEXTS)
    write_dataset([input_of(path)], tmp_path / "out", tokenizer=ByteTokenizer())
    assert written(tmp_path / "out") == by_megatron(tmp_path / "theirs", TEXTS)
    assert sorted(p.name for p in tmp_path.glob("out*")) == ["out.bin", "out.idx"]


@pytest.mark.parametrize("ending", documents.FORMATS)
def test_records_after_a_number(ending: str, tmp_path: Path) -> None:
    path = write_format(tmp_path / f"corpus{ending}", TEXTS)
    for after in (0, 1, 99, 100, 101, 1299, 1300):
        records = list(documents.read_records(path, after=after))
        assert [record.number for record in records] == list(range(after + 1, 1301))
        texts = [
            documents.document_of(record, path="", json_key="text").decode() for record in records
        ]
        assert texts == TEXTS[after:]
    assert records == []


def test_many_processes_write_the_same(tmp_path: Path) -> None:
    inputs = [input_of(write_format(tmp_path / f"{i}.jsonl", TEXTS[i:])) for i in range(3)]
    (tmp_path / "whole.txt").write_bytes(b"one \xff file")
    inputs.insert(1, input_of(tmp_path / "whole.txt"))
    summaries = [
        write_dataset(inputs, tmp_path / f"out{n}", tokenizer=ByteTokenizer(), workers=n)
        for n in (1, 2)
    ]
    assert written(tmp_path / "out1") == written(tmp_path / "out2")
    figures = [
        (s.documents, s.tokens, s.bytes_read, s.bytes_written, s.empty, s.replaced)
        for s in summaries
    ]
    assert figures[0] == figures[1]
    assert summaries[0].documents == 1300 + 1 + 1299 + 1298
    assert summaries[0].replaced == 1


def test_a_failure_in_another_process_names_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(as_jsonl(TEXTS[:1000]) + b"{\n" + as_jsonl(TEXTS) + b"[]\n")
    arguments = ["--input", str(path), "--output", str(tmp_path / "out"), "--workers", "2"]
    assert main(arguments) == 1
    assert "bad.jsonl, line 1001 is not JSON" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


class Stopping(ByteTokenizer):
    """Stops at a document, once, in one of several ways."""

    def __init__(self, at: int, how: Any) -> None:
        super().__init__()
        self.left = at
        self._how = how

    def encode(self, document: bytes) -> NDArray[np.uint8]:
        if not self.left:
            self._how()
        self.left -= 1
        return super().encode(document)


def interrupt() -> None:
    raise KeyboardInterrupt


def resume(inputs: Sequence[Input], prefix: Path) -> tuple[Summary, int]:
    """Go on, and return how many documents were tokenized."""
    tokenizer = Stopping(10**9, interrupt)
    summary = write_dataset(inputs, prefix, tokenizer=tokenizer)
    return summary, 10**9 - tokenizer.left


@pytest.mark.parametrize("ending", documents.FORMATS)
def test_an_interrupted_run_goes_on(ending: str, tmp_path: Path) -> None:
    texts = [TEXTS[:700], ["", "\n"], [], TEXTS[700:]]
    inputs = [
        input_of(write_format(tmp_path / f"{index}{ending}", part))
        for index, part in enumerate(texts)
    ]
    whole = write_dataset(inputs, tmp_path / "whole", tokenizer=ByteTokenizer())
    assert whole.empty == 1
    prefix = tmp_path / "out"
    # In the first input, in the last, and twice in a run.
    for stops in ((600,), (1250,), (513, 10, 600)):
        done = 0
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                write_dataset(
                    inputs,
                    prefix,
                    tokenizer=Stopping(stop, interrupt),
                    commit_interval_s=0.0,
                )
            assert not Path(f"{prefix}.bin").exists()
            left = json.loads(Path(f"{prefix}.partial", "progress.json").read_text())
            done = left["documents"]
            # What came after the last record is cut off.
            with Path(f"{prefix}.partial", "bin").open("ab") as file:
                file.write(b"torn")
        summary, tokenized = resume(inputs, prefix)
        assert tokenized == 1301 - done < 1301
        assert written(prefix) == written(tmp_path / "whole")
        assert (summary.documents, summary.tokens, summary.empty) == (
            whole.documents,
            whole.tokens,
            whole.empty,
        )
        for suffix in ("bin", "idx"):
            Path(f"{prefix}.{suffix}").unlink()
        assert not Path(f"{prefix}.partial").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.tools.test_dataset_writer import Stopping, input_of
from megatron_async.tools.dataset_writer import write_dataset

def die():
    os.kill(os.getpid(), signal.SIGKILL)

path, prefix = map(Path, sys.argv[1:])
tokenizer = Stopping(600, die)
write_dataset([input_of(path)], prefix, tokenizer=tokenizer, commit_interval_s=0.0)
"""


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    path = write_format(tmp_path / "corpus.jsonl", TEXTS)
    prefix = tmp_path / "out"
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(prefix)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    _, tokenized = resume([input_of(path)], prefix)
    assert tokenized == 1300 - 512
    assert written(prefix) == by_megatron(tmp_path / "theirs", TEXTS)


def test_other_inputs_start_afresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_format(tmp_path / "corpus.jsonl", TEXTS)
    prefix = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        write_dataset(
            [input_of(path)],
            prefix,
            tokenizer=Stopping(600, interrupt),
            commit_interval_s=0.0,
        )
    write_format(path, TEXTS[::-1])
    _, tokenized = resume([input_of(path)], prefix)
    assert tokenized == 1300
    assert "starting afresh" in capsys.readouterr().err
    assert written(prefix) == by_megatron(tmp_path / "theirs", TEXTS[::-1])


def test_killed_between_the_two_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_format(tmp_path / "corpus.jsonl", TEXTS[:10])
    prefix = tmp_path / "out"
    move = dataset_writer._Output.move

    def first_only(self: Any, targets: Sequence[Path]) -> None:
        move(self, targets[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset_writer._Output, "move", first_only)
    with pytest.raises(KeyboardInterrupt):
        write_dataset([input_of(path)], prefix, tokenizer=ByteTokenizer())
    monkeypatch.undo()
    _, tokenized = resume([input_of(path)], prefix)
    assert tokenized == 0
    assert written(prefix) == by_megatron(tmp_path / "theirs", TEXTS[:10])


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    path = write_format(tmp_path / "corpus.jsonl", TEXTS[:10])

    class Meeting(ByteTokenizer):
        def encode(self, document: bytes) -> NDArray[np.uint8]:
            with pytest.raises(DataError, match="another process is writing"):
                write_dataset([input_of(path)], tmp_path / "out", tokenizer=ByteTokenizer())
            return super().encode(document)

    write_dataset([input_of(path)], tmp_path / "out", tokenizer=Meeting())
    assert written(tmp_path / "out") == by_megatron(tmp_path / "theirs", TEXTS[:10])


@pytest.mark.parametrize("ending", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_file_that_is_cut_off(ending: str, tmp_path: Path) -> None:
    path = write_format(tmp_path / f"corpus{ending}", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"corpus.* (is damaged or cut off|cannot be read): "):
        list(read_documents(path))
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"corpus.* (is damaged or cut off|cannot be read): "):
        list(read_documents(path))


@pytest.mark.parametrize(
    ("ending", "library"), [(".jsonl.zst", "zstandard"), (".parquet", "pyarrow")]
)
def test_a_missing_library_is_said_before_anything_is_read(
    ending: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_format(tmp_path / "a.jsonl", TEXTS[:3])
    path = tmp_path / f"b{ending}"
    path.write_bytes(b"whatever")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(DataError, match=rf"{library}: pip install 'megatron-async\[data\]'"):
        write_dataset(
            [input_of(first), input_of(path)],
            tmp_path / "out",
            tokenizer=Stopping(0, interrupt),
        )


def test_columns_of_a_parquet_file(tmp_path: Path) -> None:
    path = write_format(tmp_path / "corpus.parquet", TEXTS[:5])
    with pytest.raises(DataError, match=r'no column "words", only id, text; name it with --json-k'):
        list(read_documents(path, json_key="words"))
    with pytest.raises(DataError, match=r'row 1 has no text in the column "id"'):
        list(read_documents(path, json_key="id"))
    assert list(read_documents(path)) == [text.encode() for text in TEXTS[:5]]


def test_compressed_files_of_a_directory_are_taken(tmp_path: Path) -> None:
    made = [write_format(tmp_path / f"{e[1]}{e}", TEXTS[:2]) for e in documents.FORMATS]
    (tmp_path / "picture.gz").write_bytes(gzip.compress(b"no") + b"\0")
    found = [one.path for one in documents.find_inputs([str(tmp_path)])]
    assert found == sorted(made)
