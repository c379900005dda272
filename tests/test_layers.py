"""The rules of the package's structure, tried: what breaks them is found."""

import argparse
import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.gpt import REPOSITORY

PACKAGE = REPOSITORY / "megatron_async"
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package and what import-linter is told of it, to break."""
    folder = tmp_path_factory.mktemp("copied")
    without = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "megatron_async", ignore=without)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what `make lint` runs."""
    return subprocess.run(
        [sys.executable, "-c", LINT, "--no-logo", "--no-cache"],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_lint_checks_the_layers() -> None:
    assert "/lint-imports" in (REPOSITORY / "Makefile").read_text()


def test_the_package_keeps_its_layers(copied: Path) -> None:
    found = lint(copied)
    assert found.returncode == 0, found.stdout + found.stderr
    assert ", 0 broken." in found.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        (
            "weights/versions.py",
            "from megatron_async.runtime.run import run",
            "each layer imports only from those below BROKEN",
        ),
        (
            "registry.py",
            "def later():\n    from megatron_async.tools import cli",
            "each layer imports only from those below BROKEN",
        ),
        (
            "schedules/paci.py",
            "import torch",
            "schedules are plain data BROKEN",
        ),
        (
            "scripts/pretrain_gpt.py",
            "import megatron_async.runtime.engine",
            "the training script stands alone BROKEN",
        ),
    ],
    ids=["upward", "upward-and-late", "torch-in-a-schedule", "the-script"],
)
def test_an_import_that_breaks_them_fails(
    copied: Path, module: str, line: str, contract: str
) -> None:
    file = copied / "megatron_async" / module
    before = file.read_text()
    file.write_text(f"{before}\n{line}\n")
    try:
        found = lint(copied)
    finally:
        file.write_text(before)
    assert found.returncode != 0, found.stdout
    assert contract in found.stdout
    assert f"megatron_async.{module.removesuffix('.py').replace('/', '.')} ->" in found.stdout


# Private access to Megatron

ROOM = ("megatron", "hooks", "cpu_backend")
"""The folders that may know what is private in Megatron."""
_PARSER = argparse.ArgumentParser()
_BY_NAME = ("getattr", "hasattr", "setattr", "delattr")
_ARGPARSE = {*dir(_PARSER), *dir(_PARSER._get_formatter())}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def root_of(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find what a module uses of others that is private there: (line, text).

    A name with an underscore may be imported from, or looked up in, modules other than Megatron's
    (torch, os, this package), and it may be an attribute of ``self`` or ``cls`` or one that
    argparse's parsers have. All else may be Megatron's, and is found, whoever's it is.
    """
    others: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] != "megatron":
                    others.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            theirs = (node.module or "").partition(".")[0] == "megatron"
            for alias in node.names:
                if theirs and is_private(alias.name):
                    yield node.lineno, f"from {node.module} import {alias.name}"
            if theirs and any(map(is_private, (node.module or "").split("."))):
                yield node.lineno, f"from {node.module} import ..."
            if not theirs:
                others |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = root_of(node.value)
            direct = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            inherited = ast.unparse(node.value) == "super()"
            foreign = isinstance(root, ast.Name) and root.id in others
            if not (direct or inherited or foreign or node.attr in _ARGPARSE):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME:
            holder, name = node.args[:2]
            private = isinstance(name, ast.Constant) and is_private(str(name.value))
            foreign = isinstance(holder, ast.Name) and holder.id in others
            if private and not foreign:
                yield node.lineno, ast.unparse(node)


def modules() -> list[Path]:
    return sorted(
        file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in ROOM
    )


def test_private_access_to_megatron_is_in_its_room_alone() -> None:
    assert len(modules()) > 80
    found = [
        f"{file.relative_to(REPOSITORY)}:{line}: {text}"
        for file in modules()
        for line, text in private_uses(ast.parse(file.read_text()))
    ]
    assert found == [], "look it up in megatron_async/megatron"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from megatron.core.optimizer import _update", "from megatron.core.optimizer import"),
        ("from megatron.core import x\nx._hidden()", "x._hidden"),
        ("import megatron.core as core\ncore.utils._hidden", "core.utils._hidden"),
        ("def f(optimizer):\n    optimizer._step()", "optimizer._step"),
        ("def f(self):\n    self.model._flag = 1", "self.model._flag"),
        ("def f(args):\n    return getattr(args, '_given', None)", "getattr(args, '_given', None)"),
        ("import torch\ntorch._foreach_add_([], [])", None),
        ("from torch.distributed import _coalescing_manager", None),
        ("class A:\n    def f(self):\n        self._mine()\n        super()._mine()", None),
        ("def f(parser):\n    return parser._actions", None),
        ("def f(model):\n    return model.__dict__", None),
    ],
)
def test_the_rule_finds_what_it_is_for(code: str, found: str | None) -> None:
    uses = [text for _, text in private_uses(ast.parse(code))]
    assert len(uses) == (0 if found is None else 1), uses
    assert found is None or uses[0].startswith(found)


def test_every_module_says_what_it_offers() -> None:
    """``__all__`` is there, and names what the module has."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        body = [node for node in tree.body if not isinstance(node, ast.Expr)]
        if not body or file.name == "__main__.py":
            continue
        names = {
            target.id
            for node in body
            for target in (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if isinstance(target, ast.Name)
        }
        assert "__all__" in names or file.parent.name == "configs", file
