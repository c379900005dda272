"""Looks at what the hooks replace; prints one JSON object, probe -> "" or what is wrong.

Megatron is imported once; each probe runs in a fork of its own. Nothing here needs a GPU.
"""

import collections
import contextlib
import functools
import importlib
import io
import json
import os
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.nn  # noqa: F401

from tests.support.gpt import REPOSITORY

PACKAGE = str(REPOSITORY / "megatron_async")
MEGATRON = ("megatron.core", "megatron.training")

Attributes = dict[str, Any]
"""Name with module (and class) -> object."""


def _loaded(*packages: str) -> Iterator[tuple[str, types.ModuleType]]:
    for name, module in sorted(sys.modules.items()):
        # Some are no modules.
        if issubclass(type(module), types.ModuleType) and any(
            name == package or name.startswith(package + ".") for package in packages
        ):
            yield name, module


def _attributes(*packages: str) -> Attributes:
    """All attributes of the loaded modules of packages, and of the classes that they define."""
    found: Attributes = {}
    for name, module in _loaded(*packages):
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = value
            if isinstance(value, type) and value.__module__ == name:
                for own, member in list(vars(value).items()):
                    found[f"{name}.{attribute}.{own}"] = member
    return found


def _changed(before: Attributes, after: Attributes) -> set[str]:
    kinds = (property, staticmethod, classmethod)
    tables = _hook_names() | _cpu_names()
    changed = {
        name
        for name, value in before.items()
        # Else counters and caches would count, and modules, which come with imports.
        if callable(value) or isinstance(value, kinds) or name in tables
        if after.get(name) is not value
    }
    # Of a class that was replaced all members are others.
    return {name for name in changed if name.rpartition(".")[0] not in changed}


def _changed_by_imports() -> set[str]:
    """What Megatron's own imports replace in torch."""

    def changed() -> str:
        before = _attributes("torch")
        _import_all_of_the_tables()
        return json.dumps(sorted(_changed(before, _attributes("torch"))))

    return set(json.loads(_fork(changed)))


@functools.cache
def _empty_script() -> str:
    file = Path(tempfile.gettempdir()) / f"megatron-async-empty-{os.getpid()}.py"
    file.write_text("import sys\nSEEN = list(sys.argv)\n")
    return str(file)


def _launch(*argv: str) -> None:
    from megatron_async.__main__ import main

    main([*argv[:1], _empty_script(), *argv[1:]] if argv[:1] == ("--cpu",) else [*argv])


def _hook_names() -> set[str]:
    from megatron_async.hooks import HOOKS
    from megatron_async.megatron import releases
    from megatron_async.megatron.replaced import is_for

    return {hook.name for hook in HOOKS if is_for(hook, releases.current())}


def _cpu_names() -> set[str]:
    from megatron_async import cpu_backend

    return {row.name for row in cpu_backend.replacements()}


def _import_all_of_the_tables() -> None:
    from megatron_async.hooks import HOOKS

    for hook in HOOKS:
        importlib.import_module(hook.target.partition(":")[0])


def cpu_alone() -> None:
    """With --cpu and no other flag, the CPU table's attributes are replaced and nothing else."""
    from megatron_async import cpu_backend
    from megatron_async.megatron.replaced import resolve

    imports = _changed_by_imports()
    torch_before = _attributes("torch")
    _launch("--cpu", "--lr", "1")
    replaced = _changed(torch_before, _attributes("torch")) - imports
    assert replaced, "nothing of torch was replaced"
    rows = {row.attribute for row in cpu_backend.replacements()}
    extra = {name for name in replaced if name.rpartition(".")[2] not in rows}
    assert not extra, f"not in the table: {extra}"
    missing = {name for name in _cpu_names() if name in torch_before} - replaced
    assert not missing, f"in the table, but not replaced: {missing}"
    _import_all_of_the_tables()
    after = _attributes("torch", *MEGATRON)
    known = {id(vars(resolve(row.target)).get(row.attribute)) for row in cpu_backend.replacements()}
    extra = {
        name
        for name, value in after.items()
        if isinstance(value, types.FunctionType) and id(value) not in known
        if value.__code__.co_filename.startswith(PACKAGE)
    }
    assert not extra, f"not in the table: {extra}"
    marked = {n for n, v in after.items() if getattr(v, "_megatron_async_hook", None) is True}
    assert not marked, f"replaced by a hook: {marked}"
    from megatron_async import hooks

    assert not hooks.installed()


def no_flag() -> None:
    """Without a flag of the package not one attribute is replaced."""
    before = _attributes("torch", *MEGATRON)
    assert _hook_names() <= before.keys(), "the table names attributes that were not looked at"
    _launch(_empty_script(), "--lr", "1", "--optimizer", "muon")
    changed = _changed(before, _attributes("torch", *MEGATRON))
    assert not changed, f"replaced: {changed}"
    assert (
        "megatron_async.hooks" not in sys.modules
        or not sys.modules["megatron_async.hooks"].installed()
    )


def a_flag() -> None:
    """With a flag of the package the table's attributes are replaced and nothing else."""
    before = _attributes("torch", *MEGATRON)
    _launch(_empty_script(), "--pipeline-schedule", "pipedream-2bw")
    changed = _changed(before, _attributes("torch", *MEGATRON))
    assert changed == _hook_names(), f"differ: {changed ^ _hook_names()}"
    # What is replaced in every module that bound it has to be replaced in all of them.
    counts = collections.Counter(name.rpartition(".")[2] for name in _hook_names())
    everywhere = {name for name in _hook_names() if counts[name.rpartition(".")[2]] > 1}
    assert everywhere
    originals = {id(before[name]) for name in everywhere}
    stale = {n for n, v in _attributes(*MEGATRON).items() if id(v) in originals}
    assert not stale, f"still the originals: {stale}"


def script_gets_its_arguments() -> None:
    _launch(_empty_script(), "--lr", "1")
    assert sys.argv == [_empty_script(), "--lr", "1"], sys.argv
    assert sys.path[0] == str(Path(_empty_script()).parent)


def folder_of_the_script_counts() -> None:
    """When Megatron is imported: that of a checkout is the one beside its script."""
    from megatron_async import hooks

    install, seen = hooks.install, []
    hooks.install = lambda: seen.append(sys.path[0])
    try:
        _launch(_empty_script(), "--pipeline-schedule", "pipedream-2bw")
    finally:
        hooks.install = install
    assert seen == [str(Path(_empty_script()).resolve().parent)], seen


def help_lists_the_flags() -> None:
    """With Megatron's own, whose parser cannot print its help by itself in 0.19."""
    script = Path(tempfile.gettempdir()) / f"megatron-async-help-{os.getpid()}.py"
    script.write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    printed, code = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        try:
            _launch(str(script), "--help")
        except SystemExit as end:
            code = end.code
    assert code == 0, code
    for flag in ("--num-layers", "--pipeline-schedule", "--adan-beta1"):
        assert f"\n  {flag} " in printed.getvalue(), flag


def twice() -> None:
    """A second installation changes nothing."""
    import megatron_async
    from megatron_async import hooks

    megatron_async.install()
    assert hooks.installed()
    before = _attributes(*MEGATRON)
    megatron_async.install()
    _launch(_empty_script(), "--pipeline-schedule", "pipedream-2bw")
    assert not _changed(before, _attributes(*MEGATRON))


def _refused(*words: str) -> None:
    from megatron_async import hooks

    before = _attributes(*MEGATRON)
    message = None
    try:
        hooks.install()
    except RuntimeError as error:
        message = str(error)
    assert message is not None, "it was installed"
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    assert not hooks.installed()
    assert not _changed(before, _attributes(*MEGATRON)), "something was replaced"


def too_late_for_a_script() -> None:
    """A script has bound a name of the table: it would go on with the original."""
    script = types.ModuleType("users_script")
    exec("from megatron.training.training import get_megatron_optimizer", vars(script))
    sys.modules["users_script"] = script
    _refused("too late", "users_script", "get_megatron_optimizer", "python -m megatron_async")


def too_late_for_main() -> None:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    vars(sys.modules["__main__"])["get_forward_backward_func"] = get_forward_backward_func
    _refused("too late", "__main__", "get_forward_backward_func")


def too_late_for_the_arguments() -> None:
    from megatron.training import global_vars

    global_vars._GLOBAL_ARGS = object()
    _refused("too late", "parsed its arguments", "ahead of all Megatron imports")


def untested_release() -> None:
    from megatron.core import package_info

    installed = package_info.__version__
    for release in ("0.21.0", "0.18.1", "0.17.1", "1.0.0"):
        package_info.__version__ = release
        _refused(release, "0.18, 0.19, 0.20", "Install a megatron-core that is >=0.18.2,<0.21")
    package_info.__version__ = f"{'.'.join(installed.split('.')[:2])}.7"
    a_flag()


def replaced_by_another_copy() -> None:
    from megatron.training import training

    def other(*_: Any) -> None: ...

    vars(other)["_megatron_async_hook"] = True
    training.train_step, training.get_megatron_optimizer = training.train_step, other
    _refused("megatron.training.training.get_megatron_optimizer is replaced already")


def table() -> None:
    """Every row names something that is there, once, says why, and keeps its signature."""
    import inspect

    from megatron_async import hooks
    from megatron_async.megatron import releases
    from megatron_async.megatron.replaced import is_for

    for release in ("0.18.2", "0.19.0", "0.20.0"):
        names = [hook.name for hook in hooks.HOOKS if is_for(hook, release)]
        assert len(set(names)) == len(names)
    assert all(any(is_for(h, r) for r in ("0.18.2", "0.19.0", "0.20.0")) for h in hooks.HOOKS)
    rows = [hook for hook in hooks.HOOKS if is_for(hook, releases.current())]
    names = [hook.name for hook in rows]
    before = _attributes(*MEGATRON)
    for hook, name in zip(rows, names, strict=True):
        assert name in before, f"there is no {name}"
        assert len(hook.why) > 10, name
        assert hook.versions, name
    hooks.install()
    after = _attributes(*MEGATRON)
    for name in names:
        if callable(before[name]):
            assert inspect.signature(after[name]) == inspect.signature(before[name]), name


PROBES: tuple[Callable[[], None], ...] = (
    no_flag,
    a_flag,
    script_gets_its_arguments,
    folder_of_the_script_counts,
    help_lists_the_flags,
    twice,
    too_late_for_a_script,
    too_late_for_main,
    too_late_for_the_arguments,
    untested_release,
    replaced_by_another_copy,
    table,
)


def _fork(work: Callable[[], str | None]) -> str:
    """Run something in a process of its own; return what it returns, or how it failed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work() or ""
        except BaseException:
            answer = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    status = os.waitpid(pid, 0)[1]
    return answer if status == 0 else f"ended with status {status}\n{answer}"


def main() -> None:
    _empty_script()
    # The CPU table has to come before the first import of Megatron.
    found = {"cpu_alone": _fork(cpu_alone)}
    _import_all_of_the_tables()
    found |= {probe.__name__: _fork(probe) for probe in PROBES}
    Path(_empty_script()).unlink()
    print("FOUND", json.dumps(found))


if __name__ == "__main__":
    main()
