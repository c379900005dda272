"""What the CPU backend replaces: what its table says, and nothing else."""

from pathlib import Path

import pytest

from tests.support.torchrun import run_python


def test_importing_replaces_nothing() -> None:
    result = run_python(
        """
        import json, os, sys
        environment = dict(os.environ)
        from megatron_async import cpu_backend
        loaded = [name for name in ("torch", "megatron.core") if name in sys.modules]

        import torch, torch.utils.data
        from megatron_async.megatron.replaced import resolve
        holders = (torch, torch.Tensor, torch.cuda, torch.distributed, torch.optim.Optimizer)
        before = [dict(vars(holder)) for holder in holders]
        rows = [row for row in cpu_backend.replacements() if row.target.startswith("torch")]
        print(json.dumps({
            "loaded": loaded,
            "installed": cpu_backend.installed(),
            "environment": environment == dict(os.environ),
            "same": [
                all(vars(holder)[name] is value for name, value in attributes.items())
                for holder, attributes in zip(holders, before)
            ],
            "rows": len(rows),
            "why": [row.name for row in cpu_backend.replacements() if not row.why],
        }))
        """
    )
    assert result.pop("rows") > 50
    assert result == {
        "loaded": [],
        "installed": False,
        "environment": True,
        "same": [True] * 5,
        "why": [],
    }


def test_install_replaces_exactly_what_the_table_says(tmp_path: Path) -> None:
    # A package that cannot be imported without a GPU, as Megatron's users may have it.
    (tmp_path / "transformer_engine.py").write_text("raise OSError('libcuda.so.1 is missing')\n")
    result = run_python(
        """
        import inspect, json, os, sys
        import torch, torch.utils.data, torch.cuda.nvtx
        from megatron_async import cpu_backend
        from megatron_async.megatron.replaced import resolve

        def attributes():
            # Of all modules of torch that are loaded, and of the classes in them.
            modules = [m for n, m in sys.modules.items() if n.partition(".")[0] == "torch" and m]
            classes = [
                value for module in modules for value in vars(module).values()
                if inspect.isclass(value) and value.__module__.startswith("torch")
            ]
            return {
                (id(holder), name): (getattr(holder, "__name__", "?"), value)
                for holder in modules + classes for name, value in list(vars(holder).items())
            }

        before = attributes()
        applied = cpu_backend.install()
        again = cpu_backend.install()
        after = attributes()
        rows = [row for row in applied if row.target.startswith("torch")]
        table = {(id(resolve(row.target)), row.attribute): row.name for row in rows}
        holders = {id(resolve(row.target)) for row in rows if ":" in row.target}
        changed = {
            key: f"{holder}.{key[1]}" for key, (holder, value) in after.items()
            # Counters and caches change by themselves, and one function by Megatron's own doing.
            if (key in table or callable(value))
            and not str(getattr(value, "__module__", "")).startswith("megatron.")
            # A method that was inherited before is new in its class.
            and (before[key][1] is not value if key in before else key[0] in holders)
        }
        try:
            import transformer_engine
            hidden = False
        except ImportError:
            hidden = True
        everything = cpu_backend.replacements()
        print(json.dumps({
            "not in the table": [name for key, name in changed.items() if key not in table],
            "not replaced": [name for key, name in table.items() if key not in changed],
            "neither applied nor absent": [
                row.name for row in everything
                if row.name not in [other.name for other in applied]
                and hasattr(resolve(row.target), row.attribute)
            ],
            "twice in the table": len(everything) - len({row.name for row in everything}),
            "idempotent": again == applied and cpu_backend.installed(),
            "GPU package hidden": hidden,
            "GPUs": os.environ["CUDA_VISIBLE_DEVICES"],
            "torch._dynamo": "torch._dynamo" in sys.modules,
        }))
        """,
        path=tmp_path,
    )
    assert result == {
        "not in the table": [],
        "not replaced": [],
        "neither applied nor absent": [],
        "twice in the table": 0,
        "idempotent": True,
        "GPU package hidden": True,
        "GPUs": "",
        "torch._dynamo": False,
    }


def test_the_rows_of_megatron_replace_nothing_else() -> None:
    result = run_python(
        """
        import json, sys
        from megatron_async.cpu_backend.megatron_rows import megatron_rows
        from megatron_async.megatron.replaced import apply, resolve
        from megatron.core.package_info import __version__

        rows = megatron_rows()
        [resolve(row.target) for row in rows]
        holders = {m.__name__: m for n, m in sys.modules.items() if n.startswith("megatron.") and m}
        holders |= {row.target: resolve(row.target) for row in rows}
        before = {name: dict(vars(holder)) for name, holder in holders.items()}
        apply(rows, __version__)
        changed = [
            [name, key] for name, holder in holders.items() for key, value in vars(holder).items()
            if key not in before[name] or before[name][key] is not value
        ]
        print(json.dumps({
            "changed": sorted(changed),
            "rows": sorted([row.target, row.attribute] for row in rows),
        }))
        """
    )
    assert result["changed"] == result["rows"]
    assert len(result["rows"]) >= 9


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.modules['megatron.core'] = types.ModuleType('megatron.core')", "megatron.core was"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "has used a GPU"),
        (
            "import megatron_async.megatron.releases as m; m.VERSIONS = '<0.17'",
            "does not know megatron-core 0.",
        ),
    ],
)
def test_install_refuses_and_says_why(before: str, message: str) -> None:
    error = run_python(
        f"""
        import json, sys, types
        {before}
        from megatron_async import cpu_backend
        try:
            cpu_backend.install()
        except RuntimeError as error:
            print(json.dumps([str(error), cpu_backend.installed()]))
        """
    )
    assert message in error[0]
    assert error[1] is False


def test_a_version_without_an_attribute_is_refused_and_left_alone() -> None:
    from megatron_async.megatron.replaced import Replacement, apply

    def row(attribute: str, versions: str = ">=2", optional: bool = False) -> Replacement:
        return Replacement(
            target="json",
            attribute=attribute,
            make=lambda original: original,
            why="test",
            versions=versions,
            optional=optional,
        )

    with pytest.raises(RuntimeError, match=r"json\.gone.*>=2"):
        apply([row("dumps"), row("gone")], "2.5")
    chosen = [row("dumps"), row("gone", optional=True), row("loads", versions="<2")]
    assert apply(chosen, "2.5+cu130") == (chosen[0],)
