"""``megatron-async compare A B``: where two runs part.

Reads the folders that two runs wrote with ``--log-fingerprints`` and names the first iteration,
stage and tensor that differ: for a run that was resumed, for a GPU against CPU ranks, for a port of
this package to a fork. See :mod:`megatron_async.runtime.fingerprints` for what is in the files.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CompareError", "Difference", "Fingerprint", "compare", "main", "read"]

_ORDER = ("random", "gradient", "weight", "state")
"""Within an iteration, causes before effects."""


class CompareError(Exception):
    """The folders cannot be compared; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """One tensor of one update on one rank."""

    rank: int
    stage: int
    iteration: int
    version: int
    what: str
    name: str
    hash: str
    norm: float

    @property
    def place(self) -> str:
        """For people."""
        return f"iteration {self.iteration}, stage {self.stage}, rank {self.rank}"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The same tensor in both runs, and not the same."""

    a: Fingerprint
    b: Fingerprint

    @property
    def relative(self) -> float:
        """Difference of the norms relative to the larger one."""
        size = max(abs(self.a.norm), abs(self.b.norm))
        return abs(self.a.norm - self.b.norm) / size if size else 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a folder holds."""

    world: int
    stages: int
    prints: dict[tuple[int, int, str, str], Fingerprint]
    """By (iteration, rank, what, name)."""


def read(directory: Path) -> Run:
    """Read a folder. Of an iteration that was run twice, the last time counts.

    Raises:
        CompareError: it holds no fingerprints, or a file is broken.
    """
    files = sorted(directory.glob("rank*.jsonl"))
    if not files:
        raise CompareError(f"{directory} has no rank*.jsonl: write them with --log-fingerprints.")
    prints: dict[tuple[int, int, str, str], Fingerprint] = {}
    world = stages = 0
    for file in files:
        rank = stage = 0
        for number, record in enumerate(_records(file), start=1):
            try:
                if "world" in record:
                    rank, stage = record["rank"], record["stage"]
                    world, stages = record["world"], record["stages"]
                    continue
                found = Fingerprint(rank=rank, stage=stage, **record)
            except (KeyError, TypeError) as error:
                raise CompareError(f"{file}, line {number}: {error}") from error
            prints[found.iteration, rank, found.what, found.name] = found
    if len(files) != world:
        raise CompareError(f"{directory} has {len(files)} files of a run of {world} ranks.")
    return Run(world=world, stages=stages, prints=prints)


def _records(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise CompareError(f"{file}, line {number}: {error}") from error


def compare(a: Run, b: Run, *, tolerance: float = 0.0) -> tuple[list[Difference], int, list[str]]:
    """Compare what both runs have.

    Runs of the same layout are compared rank by rank. Of different layouts those tensors are
    compared that have one name and shape; where a rank holds a part of a tensor in one and the
    whole in the other, that counts as a difference.

    Args:
        a: one run.
        b: the other.
        tolerance: norms may differ by this, relative to the larger one; 0 asks for equal bytes.

    Returns:
        The differences, the first iteration first and causes before effects; how many tensors were
        compared; and what could not be.

    Raises:
        CompareError: there is no tensor that both have.
    """
    same_layout = (a.world, a.stages) == (b.world, b.stages)

    def keyed(run: Run) -> dict[tuple[int, int, str, str], Fingerprint]:
        if same_layout:
            return run.prints
        # The first rank that has it: replicas hold the same.
        found: dict[tuple[int, int, str, str], Fingerprint] = {}
        for (iteration, _, what, name), each in sorted(run.prints.items()):
            if what != "random":  # Layouts seed differently.
                found.setdefault((iteration, 0, what, name), each)
        return found

    ours, theirs = keyed(a), keyed(b)
    common = ours.keys() & theirs.keys()
    if not common:
        raise CompareError("the two runs have no tensor of one iteration in common.")
    notes: list[str] = []
    iterations = {key[0] for key in common}
    alone = [key for key in ours.keys() ^ theirs.keys() if key[0] in iterations]
    if alone:
        iteration, _, what, name = min(alone, key=_key)
        notes.append(
            f"{len(alone)} tensors are in one run alone, the first in iteration {iteration}: "
            f"{what} {name}"
        )
    pairs = (
        Difference(a=ours[key], b=theirs[key])
        for key in sorted(common, key=_key)
        if ours[key].hash != theirs[key].hash
    )
    differences = [pair for pair in pairs if tolerance == 0.0 or pair.relative > tolerance]
    return differences, len(common), notes


def _key(key: tuple[int, int, str, str]) -> tuple[int, int, int, str]:
    iteration, rank, what, name = key
    return iteration, _ORDER.index(what) if what in _ORDER else len(_ORDER), rank, name


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0 if the runs agree, 1 if not, 2 if they cannot be compared."""
    args = _parser().parse_args(argv)
    try:
        a, b = read(args.a), read(args.b)
        differences, compared, notes = compare(a, b, tolerance=args.tolerance)
    except (CompareError, OSError) as error:
        print(f"megatron-async compare: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(note)
    if not differences:
        how = "bytes" if args.tolerance == 0.0 else f"norms to {args.tolerance:g}"
        print(f"equal: {compared} tensors, {how}")
        return 0
    first = differences[0]
    print(f"first difference: {first.a.place}: {first.a.what} {first.a.name}")
    print(
        f"  norm {first.a.norm:.9g} and {first.b.norm:.9g} (relative difference "
        f"{first.relative:.2g}), hash {first.a.hash} and {first.b.hash}"
    )
    if first.a.version != first.b.version:
        print(f"  weight version {first.a.version} and {first.b.version}")
    same = [each for each in differences if each.a.iteration == first.a.iteration]
    print(
        f"in that iteration {len(same)} tensors differ; {len(differences)} of {compared} in all "
        "iterations"
    )
    for each in same[1 : args.most]:
        print(f"  {each.a.place}: {each.a.what} {each.a.name}, relative {each.relative:.2g}")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async compare",
        description="Name the first iteration, stage and tensor in which two runs differ, from the "
        "folders that they wrote with --log-fingerprints.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, metavar="A", help="folder of one run")
    parser.add_argument("b", type=Path, metavar="B", help="folder of the other")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="REL",
        help="largest relative difference of norms; default 0, which asks for equal bytes",
    )
    parser.add_argument(
        "--most", type=int, default=10, metavar="N", help="differences to list (default 10)"
    )
    return parser
