"""Megatron whose source calls the hooks: the same training as with hooks that are installed."""

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from megatron_async import hooks
from megatron_async.hooks import row
from megatron_async.megatron import releases
from megatron_async.megatron.replaced import is_for
from tests.support.forked import ForkedJob, Record, run_forked
from tests.support.gpt import ASYNC, REPOSITORY, Value, gpt_args
from tests.support.torchrun import environment, run_torchrun

# Dropout is on: the generators count, too.
SYNCHRONOUS: Mapping[str, Value] = {
    "pipeline_model_parallel_size": 2,
    "train_iters": 5,
    "eval_interval": 3,
    "eval_iters": 1,
    "optimizer": "sgd",
}
ASYNCHRONOUS: Mapping[str, Value] = {
    **SYNCHRONOUS,
    **ASYNC,
    "optimizer": "adam",
    "delay_correction": "error-feedback",
    "log_pipeline_bubble": True,
}

IN_SOURCE = """
import os
import megatron.core
from megatron_async import hooks

assert megatron.core.__file__.startswith(os.environ["PATCHED"] + os.sep), megatron.core.__file__
assert hooks.in_source()
"""


RELEASES = ("0.18.2", "0.19.2", "0.20.0")


def test_there_is_a_patch_for_each_series() -> None:
    assert tuple(map(releases.series, RELEASES)) == releases.SUPPORTED


@pytest.mark.parametrize("release", RELEASES)
def test_a_patch_calls_what_the_table_has_for_its_release(release: str) -> None:
    """Each function as often as there are attributes that it replaces."""
    file = REPOSITORY / "patches" / f"megatron-core-{releases.series(release)}.patch"
    found = re.findall(r"^\+.*async_hooks\.(\w+\.\w+)", file.read_text(), re.MULTILINE)
    rows = {(r.make, r.attribute): r for r in hooks.HOOKS if is_for(r, release)}
    wanted = [
        f"{r.make.__module__.removeprefix('megatron_async.hooks.')}.{r.make.__name__}"
        for r in rows.values()
    ]
    assert sorted(found) == sorted(wanted)


@pytest.mark.core
def test_the_patch_is_what_the_script_makes(site_packages: Path, patch: Path) -> None:
    """Of the table and the installed release; but for which one of its series it was made of."""
    script = str(REPOSITORY / "scripts" / "make_patch.py")
    command = [sys.executable, script, str(site_packages)]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert _code(made) == _code(patch.read_text())


def _code(patch: str) -> str:
    """All but the first paragraphs, and the places, which differ within a series."""
    lines = patch.partition("\ndiff ")[2].splitlines()
    return "\n".join(re.sub(r"^@@.*@@", "@@", line) for line in lines if line[:5] != "index")


def test_what_a_source_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [r for r in hooks.HOOKS if is_for(r, releases.current())]
    calls = {(r.make.__qualname__, r.attribute) for r in rows}
    monkeypatch.setattr(row, "_calls", calls)
    hooks.check_source()
    (lacking,) = (call for call in calls if call[1] == "_allreduce_word_embedding_grads")
    monkeypatch.setattr(row, "_calls", calls - {lacking})
    expected = r"not for megatron\.core\S+\._allreduce_word_embedding_grads: .*patches/README\.md"
    with pytest.raises(RuntimeError, match=expected):
        hooks.check_source()


def _train(directory: Path, prelude: str, env: Mapping[str, str]) -> Sequence[Record]:
    jobs = [
        ForkedJob(
            directory=directory / name,
            argv=gpt_args(**flags),
            prelude=prelude,
            dump=("embedding",),
        )
        for name, flags in (("synchronous", SYNCHRONOUS), ("asynchronous", ASYNCHRONOUS))
    ]
    records = run_forked(2, jobs, env=env)
    for record in records:
        if record.failed:
            pytest.fail(record.describe(), pytrace=False)
    return records


@pytest.mark.core
def test_it_trains_as_with_hooks(tmp_path: Path, patched: Mapping[str, str]) -> None:
    """To the last digit; without a flag of the package as the unpatched release."""
    unpatched = _train(tmp_path / "unpatched", "", {})
    in_source = _train(tmp_path / "patched", IN_SOURCE, patched)
    for wanted, found in zip(unpatched, in_source, strict=True):
        assert wanted.numbers[-1] is not None
        assert len(wanted.numbers[-1]["losses"]) == 5
        assert found.numbers == wanted.numbers
        for rank in ("rank0.pt", "rank1.pt"):
            one, other = (torch.load(each.directory / rank) for each in (wanted, found))
            assert torch.equal(one["embedding"], other["embedding"])
    for name, records in (("unpatched", unpatched), ("patched", in_source)):
        synchronous, asynchronous = records
        assert synchronous.numbers[-1]["norms"] == [], name  # type: ignore[index]
        assert len(asynchronous.numbers[-1]["norms"]) == 5, name  # type: ignore[index]
        assert "bubble: " in asynchronous.logs[-1], name


@pytest.mark.slow
def test_it_needs_no_launcher(patched: Mapping[str, str]) -> None:
    """Megatron's parser knows the flags: the bare script trains asynchronously."""
    argv = gpt_args(**ASYNCHRONOUS)
    found = run_torchrun(2, argv, launcher="plain", env=patched)
    wanted = run_torchrun(2, argv, launcher="plugin")
    assert len(wanted.losses) == 5
    assert found.losses == wanted.losses
    assert found.grad_norms == wanted.grad_norms
    assert found.validation_losses == wanted.validation_losses


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_core_tests_with_hooks_off(patched: Mapping[str, str]) -> None:
    """Equality of layouts, deferred updates and resume."""
    tests = ["training/test_equality.py", "training/test_readers.py", "checkpoint/test_session.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "core and not slow"]
    command += [f"tests/{test}" for test in tests]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**environment(), **patched}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.slow
def test_the_doctor_says_so(patched: Mapping[str, str]) -> None:
    command = [sys.executable, "-m", "megatron_async.tools.cli", "doctor"]
    env = {**environment(), **patched}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert "attributes found; called by Megatron's source, which was patched" in done.stdout
