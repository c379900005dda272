"""Run the core tests with each release of megatron-core, in an environment of its own.

    python scripts/test_matrix.py --megatron-main PATH

makes .venvs/RELEASE-pyPYTHON for each pair, with the versions of constraints.txt but for
megatron-core, runs the core tests in it (`pytest -m "core and not slow"`) and prints a table.
Releases come from the package index as wheels; "main" is built from the sources that
--megatron-main names, a git repository or a plain folder, which is copied first. An environment
that is there is used again. Each takes some 5.5 GB.

Needs nothing but the standard library.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASES = ("0.18.2", "0.19.0", "0.19.2", "main")
PYTHONS = ("3.12", "3.13")
STAMP = ".installed"


@dataclass
class Row:
    """A line of the table."""

    release: str
    python: str
    outcome: str
    versions: tuple[str, str] = ("", "")
    counts: dict[str, int] = field(default_factory=dict)
    minutes: float = 0.0

    def __str__(self) -> str:
        megatron, torch = self.versions
        counts = [str(self.counts.get(name, "")) for name in ("passed", "failed", "skipped")]
        minutes = f"{self.minutes:.0f}" if self.counts else ""
        cells = [megatron or self.release, self.python, torch, *counts, minutes]
        text = f"| {' | '.join(cells)} |"
        return text if self.outcome == "passed" else f"{text} {self.outcome}"


def find_python(version: str) -> str | None:
    """Return an interpreter of a version such as 3.13: on PATH, or of pyenv."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [f"python{version}", *map(str, sorted(versions.glob(f"{version}*/bin/python")))]
    code = "import ensurepip, sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
    for candidate in candidates:
        try:
            found = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if found.returncode == 0 and found.stdout.strip() == version:
            return candidate
    return None


def copy_sources(source: Path, ref: str, target: Path) -> None:
    """Copy a folder, or what a git repository (bare or not) has at a ref: pip would leave its
    traces among the sources."""
    is_git = (source / ".git").exists() or (source / "HEAD").is_file()
    if not is_git:
        shutil.copytree(source, target)
        return
    target.mkdir()
    archive = subprocess.Popen(["git", "-C", str(source), "archive", ref], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(target)], stdin=archive.stdout, check=True)
    if archive.wait() != 0:
        raise SystemExit(f"git archive {ref} failed in {source}")


def install(environment: Path, python: str, release: str, args: argparse.Namespace) -> None:
    """Make an environment: the package, editable, its tools, and the release."""
    if (environment / STAMP).exists():
        return
    shutil.rmtree(environment, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(environment)], check=True)
    with tempfile.TemporaryDirectory(prefix="test-matrix-") as scratch:
        lines = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("".join(x for x in lines if not x.startswith("megatron-core")))
        megatron = f"megatron-core=={release}"
        if release == "main":
            sources = Path(scratch) / "megatron"
            copy_sources(args.megatron_main, args.megatron_main_ref, sources)
            megatron = f"megatron-core @ {sources.as_uri()}"
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        pip += ["--disable-pip-version-check", "--constraint", str(constraints)]
        subprocess.run([*pip, "--editable", f"{ROOT}[dev]", megatron], check=True)
    (environment / STAMP).touch()


def versions(environment: Path) -> tuple[str, str]:
    """Return the versions of megatron-core and torch."""
    code = "from importlib.metadata import version as v; print(v('megatron-core'), v('torch'))"
    found = subprocess.run(
        [str(environment / "bin" / "python"), "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    megatron, torch = found.stdout.split()
    return megatron, torch


def run(release: str, python: str, args: argparse.Namespace) -> Row:
    """Make the environment of a pair if need be, and run the tests in it."""
    if release == "main" and args.megatron_main is None:
        return Row(release, python, "not run: give --megatron-main PATH (make: MEGATRON_MAIN=PATH)")
    environment = args.environments / f"{release}-py{python}"
    if not (environment / STAMP).exists():
        interpreter = find_python(python)
        if interpreter is None:
            return Row(release, python, f"not run: no Python {python} was found")
        print(f"== {release}, Python {python}: installing into {environment}", flush=True)
        try:
            install(environment, interpreter, release, args)
        except subprocess.CalledProcessError as error:
            return Row(
                release, python, f"not installed: {error.cmd[0]} ended with {error.returncode}"
            )
    row = Row(release, python, "passed", versions(environment))
    if args.install_only:
        return row
    print(f"== {release}, Python {python}: running the core tests", flush=True)
    report = environment / "report.xml"
    report.unlink(missing_ok=True)
    start = time.monotonic()
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    checkout = dict(pair.split("=", 1) for pair in args.checkout).get(release)
    selection = "core and not slow"
    if checkout is not None:
        variables["MEGATRON_LM_CHECKOUT"] = str(Path(checkout).resolve())
        selection = f"({selection}) or checkout"
    command = [str(environment / "bin" / "python"), "-m", "pytest", "-q", "-m", selection]
    done = subprocess.run([*command, f"--junitxml={report}", *args.pytest], cwd=ROOT, env=variables)
    row.minutes = (time.monotonic() - start) / 60
    row.counts = read_counts(report)
    if done.returncode != 0:
        row.outcome = f"pytest ended with {done.returncode}"
    return row


def read_counts(report: Path) -> dict[str, int]:
    """Read how many tests passed, failed and were skipped, from a report in JUnit's XML."""
    if not report.exists():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in suites:
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    passed = totals["tests"] - failed - totals["skipped"]
    return {"passed": passed, "failed": failed, "skipped": totals["skipped"]}


def main() -> int:
    """Run what the command line says; return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=list(RELEASES))
    parser.add_argument("--pythons", nargs="+", default=list(PYTHONS))
    parser.add_argument("--megatron-main", type=Path, help="sources of Megatron-LM's main branch")
    parser.add_argument("--megatron-main-ref", default="main", help="in a git repository")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venvs")
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument(
        "--checkout",
        nargs="+",
        default=[],
        metavar="RELEASE=PATH",
        help="checkouts of Megatron-LM, whose own pretrain_gpt.py is run as well",
    )
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, behind --")
    args = parser.parse_args()
    for release in args.releases:
        if release != "main" and not re.fullmatch(r"\d+\.\d+\.\d+\w*", release):
            parser.error(f"{release} is no release such as {RELEASES[0]}, and not main")
    rows = [run(release, python, args) for python in args.pythons for release in args.releases]
    print("\n| megatron-core | Python | torch | passed | failed | skipped | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(row)
    return 0 if all(row.outcome.startswith(("passed", "not run")) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
