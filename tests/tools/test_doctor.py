"""The command megatron-async doctor."""

import dataclasses
import platform
from importlib import metadata

import pytest

from megatron_async import hooks
from megatron_async.megatron import releases
from megatron_async.megatron.replaced import is_for
from megatron_async.tools import doctor
from megatron_async.tools.doctor import Finding, Status

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron's, about libraries it lacks


def by_subject() -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, version: str | None) -> None:
    """Let a distribution have another version, or be absent."""
    real = metadata.version

    def fake(asked: str) -> str:
        if asked != name:
            return real(asked)
        if version is None:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "version", fake)


def test_this_environment_is_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    shown = capsys.readouterr().out
    assert shown.rstrip().endswith("Ready to train.")
    for name in ("python", "torch", "megatron-core", "emerging-optimizers"):
        assert f"ok    {name} " in shown
    rows = [row for row in hooks.HOOKS if is_for(row, releases.current())]
    assert f"all {len(rows)} attributes found" in shown
    assert not hooks.installed()  # looking replaces nothing


@pytest.mark.parametrize(
    ("name", "version", "text", "fix"),
    [
        ("megatron-core", "0.17.1", "0.17.1 is not supported", "'megatron-core<0.21,>=0.18.2'"),
        ("emerging-optimizers", None, "not installed", "'emerging-optimizers<0.4,>=0.3'"),
        ("psutil", None, "not installed", "'psutil>=5.9'"),
    ],
)
def test_unsupported_distribution(
    name: str, version: str | None, text: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, version)
    finding = by_subject()[name]
    assert finding.status is Status.FAIL
    assert text in finding.text
    assert finding.fix == f"pip install {fix}"


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
    finding = next(doctor.examine())
    assert finding.status is Status.FAIL
    assert "3.11.7 is not supported" in finding.text
    assert ">=3.12" in finding.fix


def test_run_from_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", absent)
    finding = next(doctor.examine())
    assert finding.status is Status.FAIL
    assert "pip install -e ." in finding.fix


@pytest.mark.parametrize(
    ("target", "attribute"),
    [
        ("megatron.training.training", "no_such_function"),
        ("megatron.training.training:NoClass", "method"),
        ("megatron.no_such_module", "train"),
    ],
)
def test_missing_hook_target(target: str, attribute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = dataclasses.replace(hooks.HOOKS[0], target=target, attribute=attribute)
    monkeypatch.setattr(hooks, "HOOKS", (*hooks.HOOKS[1:], changed))
    finding = by_subject()["hooks"]
    assert finding.status is Status.FAIL
    rows = [row for row in hooks.HOOKS if is_for(row, releases.current())]
    assert f"1 of {len(rows)} attributes" in finding.text
    assert f"{target.replace(':', '.')}.{attribute}" in finding.text


def test_failure_is_in_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = Finding(Status.FAIL, "torch", "not installed", "pip install torch")
    monkeypatch.setattr(doctor, "examine", lambda: iter([broken]))
    assert doctor.main([]) == 1
    shown = capsys.readouterr().out
    assert "-> pip install torch" in shown
    assert "Something has to be fixed" in shown


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Finding:
        raise ImportError("libcudart.so is missing")

    broken.__name__ = "_gpus"
    monkeypatch.setattr(doctor, "_gpus", broken)
    finding = by_subject()["gpus"]
    assert finding.status is Status.FAIL
    assert "libcudart.so is missing" in finding.text
