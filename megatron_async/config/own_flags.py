"""The page of this package's own flags, made from the records that the parser is made from.

The page is made by ``python -m megatron_async.config.own_flags > docs/own_flags.md``.
"""

import sys
from collections.abc import Iterable, Mapping

from megatron_async.config.arguments import flags
from megatron_async.corrections import CORRECTIONS
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.registry import Flag
from megatron_async.schedules import SCHEDULES

__all__ = ["main", "render"]

_HEAD = """\
<!-- Made by: python -m megatron_async.config.own_flags > docs/own_flags.md -->
# Flags of megatron-async

They stand beside Megatron's own on the command line of the training script, and `--help` lists
them. [flags.md](flags.md) sorts Megatron's flags by what becomes of them under an asynchronous
schedule."""


def render() -> str:
    """The page, in Markdown."""
    of_records = {
        **_owners(SCHEDULES, "--pipeline-schedule"),
        **_owners(CORRECTIONS, "--delay-correction"),
    }
    own = [flag for flag in flags().values() if flag.name not in of_records]
    lines = [_HEAD, "", "## Of every run", "", *_table(own)]
    for title, registry in (("Of schedules", SCHEDULES), ("Of corrections", CORRECTIONS)):
        lines += ["", f"## {title}", "", *_table(registry.flags.values(), of_records)]
    owners = _owners(OPTIMIZERS, "--optimizer")
    lines += ["", "## Of optimizers", "", *_table(OPTIMIZERS.flags.values(), owners)]
    return "\n".join(lines) + "\n"


def _owners(registry: Iterable[object], flag: str) -> dict[str, str]:
    """Which records each flag means something with."""
    found: dict[str, list[str]] = {}
    for record in registry:
        for one in record.flags:  # type: ignore[attr-defined]
            found.setdefault(one.name, []).append(f"`{record.name}`")  # type: ignore[attr-defined]
    return {name: f"with `{flag}` {', '.join(names)}" for name, names in found.items()}


def _table(listed: Iterable[Flag], owners: Mapping[str, str] | None = None) -> list[str]:
    lines = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for flag in listed:
        name = f"`{flag.name}`"
        if flag.switch and flag.negatable:
            name += f", `--no-{flag.name.removeprefix('--')}`"
        elif not flag.switch:
            name = f"`{flag.name} {flag.metavar or flag.dest.upper()}`"
        where = (owners or {}).get(flag.name)
        text = flag.help.replace("%%", "%").replace("|", "\\|").replace("<", "&lt;")
        meaning = text if where is None else f"{text} Only {where}."
        lines.append(f"| {name} | {_default(flag)} | {meaning} |")
    return lines


def _default(flag: Flag) -> str:
    if flag.switch:
        return {None: "where it can be", True: "on", False: "off"}[flag.default]
    if flag.default is None:
        return "none"
    return f"`{flag.default}`"


def main() -> None:
    """Print the page."""
    sys.stdout.write(render())


if __name__ == "__main__":
    main()
