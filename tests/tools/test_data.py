"""The command megatron-async data: what it writes, and what it says about bad input."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_async.tools import data
from megatron_async.tools.data import ByteTokenizer, DataError, find_inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks


def run(*argv: str | Path) -> int:
    return data.main([str(argument) for argument in argv])


def stored_documents(prefix: Path) -> list[list[int]]:
    """Read the documents back with Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    ends = dataset.document_indices
    assert list(ends) == list(range(len(dataset) + 1))  # one sequence a document
    return [dataset[i].tolist() for i in range(len(dataset))]


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two text files, an empty one, a hidden one, one in a cache, a .jsonl file."""
    root = tmp_path / "corpus"
    (root / "sub" / "__pycache__").mkdir(parents=True)
    (root / "a.txt").write_text("alpha\n")
    (root / "sub" / "b.txt").write_text("Größe\n", encoding="utf-8")
    (root / "sub" / "empty.txt").touch()
    (root / ".hidden").write_text("no")
    (root / "sub" / "__pycache__" / "c.pyc").write_text("no")
    lines = [json.dumps({"text": "first"}), "", json.dumps({"text": ""}), '{"text": "zweité"}']
    (root / "z.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return root


def test_of_a_directory_what_is_not_text_is_left_out(corpus: Path, tmp_path: Path) -> None:
    before = find_inputs([str(corpus)])
    picture = corpus / "sub" / "picture.png"
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR")
    assert find_inputs([str(corpus)]) == before
    # What is named is taken as it is.
    assert [one.path for one in find_inputs([str(picture)])] == [picture]


def test_directory_to_documents(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "out"
    assert run("--input", corpus, "--output", prefix) == 0
    expected = ["alpha\n", "Größe\n", "first", "zweité"]
    assert stored_documents(prefix) == [[*text.encode(), 255] for text in expected]
    shown = capsys.readouterr()
    tokens = sum(len(text.encode()) + 1 for text in expected)
    size = sum((corpus / name).stat().st_size for name in ("a.txt", "sub/b.txt", "z.jsonl"))
    assert "documents  4" in shown.out
    assert f"tokens     {tokens} (vocabulary 256)" in shown.out
    assert f"bytes      {size} read from 4 files, 1 without text left out" in shown.out
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256" in shown.out
    assert "100%" in shown.err  # the progress bar's last state
    assert (tmp_path / "out.bin").stat().st_size == 2 * tokens


def test_globs_and_files_are_taken_once_and_in_order(corpus: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    inputs: list[str | Path] = [corpus / "sub/b.txt", f"{corpus}/**/*.txt"]
    assert run("--input", *inputs, "--output", f"{prefix}.bin") == 0
    assert stored_documents(prefix) == [[*"Größe\n".encode(), 255], [*b"alpha\n", 255]]


def test_byte_255_never_ends_a_document_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin").write_bytes(b"a\xffb\xe9")
    assert run("--input", tmp_path / "latin", "--output", tmp_path / "out") == 0
    assert stored_documents(tmp_path / "out") == [[*b"a\xef\xbf\xbdb\xe9", 255]]
    assert "replaced   1 bytes 255" in capsys.readouterr().out


def megatron_tokenizer(flags: tuple[str, ...]) -> Any:
    """Build the tokenizer that training builds from these flags."""
    return data.MegatronTokenizer(flags[1], flags[2:])._tokenizer


def test_training_reads_the_tokens_with_the_printed_flags(corpus: Path, tmp_path: Path) -> None:
    """Through Megatron's GPTDataset, as pretrain_gpt.py builds it."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    prefix = tmp_path / "out"
    assert run("--input", corpus, "--output", prefix) == 0
    tokenizer = megatron_tokenizer(data.BYTE_TOKENIZER_FLAGS)
    assert tokenizer.vocab_size == ByteTokenizer.vocab_size
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(prefix)], None),
        split="1",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        path_to_cache=str(tmp_path / "cache"),
    )
    low_level = GPTDataset.build_low_level_dataset(str(prefix), config)
    documents = np.arange(len(low_level), dtype=np.int32)
    dataset = GPTDataset(low_level, str(prefix), documents, None, Split.train, config)
    samples = [dataset[i] for i in range(len(dataset))]
    assert samples
    stream = [token for document in stored_documents(prefix) for token in document]
    for sample in samples:
        tokens, labels = sample["tokens"], sample["labels"]
        assert tokens[1:].equal(labels[:-1])
        assert set(tokens.tolist()) <= set(stream)
        # The loss is masked exactly where the input is the end of a document.
        assert (sample["loss_mask"] == 0).equal(tokens == 255)
    assert any((sample["tokens"] == 255).any() for sample in samples)


def test_megatrons_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids").write_text("5 70000 7")
    flags = ["--tokenizer", "NullTokenizer", "--vocab-size", "70001"]
    assert run("--input", tmp_path / "ids", "--output", tmp_path / "out", *flags) == 0
    assert stored_documents(tmp_path / "out") == [[5, 70000, 7, 70000]]
    assert (tmp_path / "out.bin").stat().st_size == 4 * 4  # 70001 tokens do not fit in 2 bytes
    assert "--tokenizer-type NullTokenizer --vocab-size 70001" in capsys.readouterr().out


def test_huggingface_tokenizer(tmp_path: Path) -> None:
    """With a tokenizer file that is made here."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<eos>": 0, "hello": 1, "world": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "text").write_text("hello world")
    flags = ["--tokenizer", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    assert run("--input", tmp_path / "text", "--output", tmp_path / "out", *flags) == 0
    assert stored_documents(tmp_path / "out") == [[1, 2, 0]]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "nowhere"], "--input nowhere: there is no such file or directory"),
        (["--input", "*.nothing"], "--input *.nothing: it stands for no file"),
        (["--input", "void"], "--input void: it stands for no file"),
        (["--input", "empty"], "--input empty: the file is empty"),
        (["--input", "empties"], "no input has any text"),
        (["--input", "text", "--output", "no/where/out"], "no folder no/where"),
        (["--input", "text", "--output", "old"], "old.bin exist; pass --overwrite"),
        (["--input", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        (["--input", "deep.jsonl"], "deep.jsonl, line 1 is not JSON: maximum recursion depth"),
        (["--input", "latin.jsonl"], "latin.jsonl, line 1 is not JSON: 'utf-8' codec"),
        (["--input", "bad.jsonl.gz"], "bad.jsonl.gz cannot be read: Not a gzipped file"),
        (["--input", "x" * 300], "it cannot be read: File name too long"),
        (["--input", "keys.jsonl"], 'keys.jsonl, line 1 has no text under "text"'),
        (["--input", "text", "--tokenizer", "Bytes"], "--tokenizer Bytes is unknown; choose"),
        (["--input", "text", "--lower-case"], "unknown arguments: --lower-case"),
        (
            ["--input", "text", "--tokenizer", "NullTokenizer", "--vocab-sise", "9"],
            "unknown arguments: --vocab-sise 9",
        ),
        (
            ["--input", "text", "--tokenizer", "GPTSentencePieceTokenizer"],
            "Megatron cannot build the tokenizer of --tokenizer-type GPTSentencePieceTokenizer",
        ),
        (
            ["--input", "text", "--tokenizer", "NullTokenizer", "--vocab-size", "9"],
            "text: the tokenizer failed: ValueError",
        ),
        (
            ["--input", "latin", "--tokenizer", "NullTokenizer", "--vocab-size", "9"],
            "latin: it is not UTF-8",
        ),
    ],
)
def test_bad_input_is_one_clear_message(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("words")
    Path("empty").touch()
    Path("void").mkdir()
    Path("empties").mkdir()
    Path("empties/one").touch()
    Path("latin").write_bytes(b"\xe9t\xe9")
    Path("old.bin").write_bytes(b"keep")
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("deep.jsonl").write_text('{"text": ' + "[" * 100_000)
    Path("latin.jsonl").write_bytes(b'{"text": "\xe9"}')
    Path("bad.jsonl.gz").write_bytes(b"text")
    Path("keys.jsonl").write_text('{"content": "fine"}\n')
    before = leftovers(tmp_path)
    output = [] if "--output" in argv else ["--output", "out"]
    assert run(*argv, *output) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if "megatron-async" in line]
    assert len(error) == 1
    assert error[0].startswith("megatron-async data: ")
    assert message in error[0]
    assert leftovers(tmp_path) == before  # no half-written output
    assert Path("old.bin").read_bytes() == b"keep"


def test_overwrite_replaces_both_files(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("new")
    for suffix in ("bin", "idx"):
        (tmp_path / f"out.{suffix}").write_bytes(b"old")
    assert run("--input", tmp_path / "text", "--output", tmp_path / "out", "--overwrite") == 0
    assert stored_documents(tmp_path / "out") == [[*b"new", 255]]


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the error comes from a stand-in."""

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match="secret cannot be read: Permission denied"):
        list(data.read_documents(tmp_path / "secret"))


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Likewise; a folder that is left out may be unreadable."""
    locked = tmp_path / "locked"
    for folder in (locked, tmp_path / ".git"):
        folder.mkdir()
    (tmp_path / "text").write_text("words")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name in ("locked", ".git"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=f"{locked} cannot be read: Permission denied"):
        find_inputs([str(tmp_path)])
    locked.rmdir()
    assert [one.path.name for one in find_inputs([str(tmp_path)])] == ["text"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("words")
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    assert run("--input", tmp_path / "text", "--output", folder / "out") == 1
    assert "is not writable" in capsys.readouterr().err


def test_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron.core.datasets import indexed_dataset

    class FullDisk(indexed_dataset.IndexedDatasetBuilder):
        def finalize(self, *args: object, **kwargs: object) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(indexed_dataset, "IndexedDatasetBuilder", FullDisk)
    (tmp_path / "text").write_text("words")
    assert run("--input", tmp_path / "text", "--output", tmp_path / "out") == 1
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert leftovers(tmp_path) == ["text"]


def test_progress_bar_on_a_terminal_and_in_a_file() -> None:
    import io

    from megatron_async.tools.progress import ProgressBar

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        with ProgressBar("Work", total=4, stream=stream) as bar:
            for done in range(5):
                bar.update(done, f"{done} of 4")
    assert terminal.getvalue().startswith("\rWork [")
    assert terminal.getvalue().endswith("100%  4 of 4\n")
    lines = log.getvalue().splitlines()
    assert lines[0].endswith("0%  0 of 4")
    assert lines[-1].endswith("100%  4 of 4")
    assert len(lines) < 5  # not one line per update


def test_data_needs_no_process_group(tmp_path: Path) -> None:
    import torch

    (tmp_path / "text").write_text("words")
    inputs = [data.Input(path=tmp_path / "text", size=5, named=True)]
    summary = data.write_dataset(inputs, tmp_path / "out", tokenizer=ByteTokenizer())
    assert not torch.distributed.is_initialized()
    expected = SimpleNamespace(documents=1, tokens=6, bytes_read=5, bytes_written=12, empty=0)
    assert vars(expected).items() <= vars(summary).items()


@pytest.mark.parametrize("documents", [1, 2, 3, 9, 10, 11, 61, 499, 999, 1000, 100_000])
def test_split_gives_each_set_that_is_wanted_a_document(documents: int) -> None:
    """Through Megatron's own arithmetic of splits; it never ends on a set without any."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    flags = data.split_flags(documents)
    split = parse_and_normalize_split(flags[1] if flags else "969,30,1")
    for bounds in convert_split_vector_to_split_matrix(split):
        if bounds is not None:
            begin, end = (round(bound * documents) for bound in bounds)
            assert end > begin
