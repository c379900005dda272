"""Make the patch that lets a release of Megatron call megatron_async from its own source.

    python scripts/make_patch.py PATH > patches/megatron-core-0.19.patch

PATH holds the folder `megatron`: a checkout of Megatron-LM, or site-packages. Where a row of the
table (megatron_async/hooks) names a function that is defined in its module, the row's function
becomes the outermost decorator; where it names one that the module imports, the name is bound anew
behind the imports. Nothing is written but the patch. See patches/README.md.
"""

import argparse
import ast
import hashlib
import runpy
import sys
import textwrap
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_async.hooks import HOOKS  # noqa: E402
from megatron_async.megatron import releases  # noqa: E402
from megatron_async.megatron.replaced import Replacement, is_for  # noqa: E402

COMMENT = "# The package megatron_async: asynchronous pipeline schedules."
CONTEXT = 3
"""Lines around each change."""
IMPORT = "from megatron_async import hooks as async_hooks"


class Source:
    """A module of Megatron."""

    def __init__(self, root: Path, module: str) -> None:
        path = root / module.replace(".", "/")
        self.file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        self.name = self.file.relative_to(root).as_posix()
        self.text = self.file.read_text()
        self.tree = ast.parse(self.text)

    def definition(self, qualname: str) -> tuple[int, int] | None:
        """The line (1 is the first) of a function's definition, its decorators included, and that
        of the definition at the top level that holds it; None if there is no such function."""
        body = self.tree.body
        lines = []
        *classes, function = qualname.split(".")
        for name in classes:
            (found,) = (n for n in body if isinstance(n, ast.ClassDef) and n.name == name)
            lines.append(_first_line(found))
            body = found.body
        for node in body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                lines.append(_first_line(node))
                return lines[-1], lines[0]
        return None

    def end_of_imports(self, first: int) -> int:
        """The last line of the imports at the top level ahead of a line."""
        ends = [n.end_lineno or 0 for n in self.tree.body if _imported_names(n)]
        return max((end for end in ends if end < first), default=0)

    def imports(self, name: str, until: int) -> bool:
        """Whether a name is imported at the top, up to a line."""
        return any(name in _imported_names(n) for n in self.tree.body if n.lineno <= until)


def _first_line(node: ast.ClassDef | ast.FunctionDef) -> int:
    return min(n.lineno for n in (node, *node.decorator_list))


def _imported_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.Try | ast.If):
        return {name for inner in node.body for name in _imported_names(inner)}
    return set()


def call(row: Replacement) -> str:
    """How Megatron's source names the function of a row."""
    module = row.make.__module__.removeprefix("megatron_async.")
    return f"async_{module}.{row.make.__qualname__}"


def make(root: Path) -> str:
    """Return the patch for the release in a folder.

    Raises:
        SystemExit: the release is not supported, or lacks an attribute of the table.
    """
    # Its own version has the commit of the current folder behind a plus sign.
    package = runpy.run_path(str(root / "megatron/core/package_info.py"))
    release = package["__version__"].partition("+")[0]
    if not releases.is_supported(release):
        raise SystemExit(f"{release} is none of the supported: {', '.join(releases.SUPPORTED)}")
    rows = [row for row in HOOKS if is_for(row, release)]
    sources = {module: Source(root, module) for module in {_module(row) for row in rows}}
    decorators: dict[str, dict[int, list[str]]] = defaultdict(dict)
    firsts: dict[str, int] = {}
    places: dict[str, list[str]] = defaultdict(list)
    defined, imported = set(), []
    for row in rows:
        module, _, holder = row.target.partition(":")
        found = sources[module].definition(".".join(filter(None, (holder, row.attribute))))
        if found is None:
            imported.append(row)
            continue
        line, first = found
        firsts[module] = min(first, firsts.get(module, first))
        indent = "    " if holder else ""
        decorators[module][line - 1] = [f"{indent}@{call(row)}\n"]
        defined.add((row.attribute, row.make))
        places[module].append(f"{row.attribute}: {row.why}")
    bindings: dict[str, list[str]] = defaultdict(list)
    for row in imported:
        if (row.attribute, row.make) in defined:
            continue  # What is imported is what the definition has become.
        module = _module(row)
        end = sources[module].end_of_imports(firsts[module])
        if not sources[module].imports(row.attribute, end):
            raise SystemExit(f"{release} has no {row.name}, which a row of the table names")
        bindings[module] += _binding(row)
        places[module].append(f"{row.attribute}: {row.why}")
    series = releases.series(release)
    text = [
        f"megatron-core {series}: call megatron_async (patches/README.md)\n\n",
        f"Made of {release} by scripts/make_patch.py.\n",
    ]
    names = sorted(places, key=lambda module: sources[module].name)
    for module in names:
        text.append(f"\n{sources[module].name}\n")
        for place in places[module]:
            lines = textwrap.wrap(
                place, 98, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False
            )
            text += [f"{line}\n" for line in lines]
    text.append("\n")
    for module in names:
        added = decorators[module]
        block = ["\n", f"{COMMENT}\n", f"{IMPORT}\n"]
        if bindings[module]:
            block += ["\n", *bindings[module]]
        added[sources[module].end_of_imports(firsts[module])] = block
        text.append(difference(sources[module], added))
    return "".join(text)


def _module(row: Replacement) -> str:
    return row.target.partition(":")[0]


def _binding(row: Replacement) -> list[str]:
    line = f"{row.attribute} = {call(row)}({row.attribute})\n"
    if len(line) <= 100:
        return [line]
    return [f"{row.attribute} = {call(row)}(\n", f"    {row.attribute}\n", ")\n"]


def difference(source: Source, added: dict[int, list[str]]) -> str:
    """Return the part of the patch that is about one file.

    Args:
        source: the file.
        added: lines by the number of the line that they follow.
    """
    before = source.text.splitlines(keepends=True)
    points = sorted(added)
    # Lines that are no more than twice the context apart share a hunk.
    groups: list[list[int]] = []
    for point in points:
        if groups and point - groups[-1][-1] <= 2 * CONTEXT:
            groups[-1].append(point)
        else:
            groups.append([point])
    after: list[str] = []
    for number, line in enumerate(before):
        after += [*added.get(number, []), line]
    name = source.name
    text = [
        f"diff --git a/{name} b/{name}\n",
        f"index {_blob(before)}..{_blob(after)} 100644\n",
        f"--- a/{name}\n+++ b/{name}\n",
    ]
    shift = 0
    for group in groups:
        start, end = max(group[0] - CONTEXT, 0), min(group[-1] + CONTEXT, len(before))
        new = sum(len(added[point]) for point in group)
        length = end - start
        text.append(f"@@ -{start + 1},{length} +{start + 1 + shift},{length + new} @@\n")
        for number in range(start, end):
            text += [f"+{line}" for line in added.get(number, [])]
            text.append(f" {before[number]}")
        shift += new
    return "".join(text)


def _blob(lines: list[str]) -> str:
    """The name that git gives to a file's content: `git apply --3way` finds it by that."""
    content = "".join(lines).encode()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("root", type=Path, metavar="PATH", help="holds the folder `megatron`")
    sys.stdout.write(make(parser.parse_args().root))


if __name__ == "__main__":
    main()
