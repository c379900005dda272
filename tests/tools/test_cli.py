"""The dispatcher of the command megatron-async."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import megatron_async
from megatron_async.tools import cli


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"megatron-async {megatron_async.__version__}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "a command is missing"), (["dmeo"], "there is no command dmeo")],
)
def test_wrong_command_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "usage: megatron-async" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_module(name: str) -> None:
    assert importlib.util.find_spec(cli.COMMANDS[name][0]) is not None


def put_in_place(monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int]) -> None:
    """Have every command run ``main``."""
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(main=main))


def test_dispatch_passes_the_rest_and_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    put_in_place(monkeypatch, main)
    assert cli.main(["data", "--input", "x"]) == 7
    assert seen == [["--input", "x"]]


def test_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    put_in_place(monkeypatch, main)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err.strip() == "megatron-async demo: interrupted"


def test_a_file_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(argv: list[str]) -> int:
        with Path("/nowhere/plan.csv").open("w"):
            return 0

    put_in_place(monkeypatch, main)
    assert cli.main(["plan"]) == 2
    shown = capsys.readouterr().err.strip()
    assert shown == "megatron-async plan: /nowhere/plan.csv: No such file or directory"
