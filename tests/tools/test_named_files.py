"""What doctor finds out about the files that a command names."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_async.tools import data
from megatron_async.tools.named_files import look_at_files, look_at_script

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks


def looked(**arguments: object) -> tuple[str, str]:
    """(problems, notes)"""
    found = look_at_files(argparse.Namespace(**{"mock_data": True, **arguments}))
    return "\n".join(found.problems), "\n".join(found.notes)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of two documents, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text('{"text": "first"}\n{"text": "second"}\n')
    assert data.main(["--input", "lines.jsonl", "--output", "corpus"]) == 0
    return tmp_path


def test_what_is_in_order_or_elsewhere_is_no_problem(corpus: Path) -> None:
    assert looked(data_path=["corpus"], load="nowhere", save="new/folder") == ("", "")
    assert looked(data_path=["0.3", "corpus", "0.7", "s3://bucket/corpus"]) == ("", "")
    assert looked(data_path=["there/corpus"]) == (
        "",
        "--data-path: there/corpus.idx is not here, and the data was not looked at.",
    )
    problems, notes = looked(mock_data=False)
    assert problems == ""
    assert "trains on mock data" in notes


def cut(name: str, size: int) -> Callable[[], object]:
    return lambda: os.truncate(name, size)


@pytest.mark.parametrize(
    ("damage", "prefix", "message"),
    [
        (cut("corpus.bin", 3), "corpus", "corpus.bin has 3 bytes and not the 26 of its index"),
        (cut("corpus.idx", 40), "corpus", "corpus.idx is cut off"),
        (cut("corpus.idx", 0), "corpus", "corpus.idx is no index of Megatron's"),
        (
            lambda: Path("corpus.bin").unlink(),
            "corpus",
            "corpus.idx is there and corpus.bin is not",
        ),
        (lambda: None, "corpus.bin", "Megatron adds the ending itself. Give corpus."),
    ],
)
def test_data_that_megatron_cannot_read(
    damage: Callable[[], object], prefix: str, message: str, corpus: Path
) -> None:
    damage()
    assert message in looked(data_path=[prefix])[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load": "text"}, "--load: text is no folder."),
        ({"load": "broken"}, "iteration.txt holds 'soon' in place of an iteration"),
        ({"save": "text/below"}, "--save: text is a file, so no folder can be made there."),
        ({"vocab_file": "empty"}, "--vocab-file: empty is empty."),
        ({"data_args_path": "broken"}, "--data-args-path: broken is no file."),
        ({"load": "x" * 300}, ""),
    ],
)
def test_other_files(
    arguments: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("text")
    Path("empty").touch()
    Path("broken").mkdir()
    Path("broken/latest_checkpointed_iteration.txt").write_text("soon")
    problems, _ = looked(**arguments)
    assert message in problems
    assert bool(message) == bool(problems)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"print()\n", ""),
        ("# -*- coding: latin-1 -*-\nprint('\xe9')\n".encode("latin-1"), ""),
        (b"", "has no code in it"),
        (b"# only words\n", "has no code in it"),
        (b"\x7fELF\0\1\2", "is no Python"),
        (b"print('\xe9')", "is no Python"),
        (b"torchrun train.py\n", "is no Python"),
        (None, "is a folder"),
    ],
)
def test_scripts(content: bytes | None, message: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    if content is None:
        script.mkdir()
    else:
        script.write_bytes(content)
    problems = "\n".join(look_at_script(script).problems)
    assert message in problems
    assert bool(message) == bool(problems)


def test_a_script_that_is_not_here_is_no_problem(tmp_path: Path) -> None:
    assert look_at_script(tmp_path / "train.py").problems == []
    assert look_at_script(tmp_path / ("x" * 300)).problems == []
