"""Rows of the tables of replaced attributes, and how they are applied.

The hooks (:mod:`megatron_async.hooks`) and the CPU backend (:mod:`megatron_async.cpu_backend`) have
a table each. An attribute that differs between releases has a row for each of them.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = [
    "Replacement",
    "applies",
    "apply",
    "constant",
    "is_for",
    "is_replaced",
    "mark",
    "resolve",
]

_MARK = "_megatron_async_hook"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement:
    """One replaced attribute.

    Attributes:
        target: what holds the attribute, as ``module`` or ``module:Class``.
        attribute: the attribute's name.
        make: takes the original (None where the attribute is absent) and returns the replacement.
        why: the reason, in one sentence.
        versions: specifier of the versions (of torch or of Megatron) that the row is for.
        optional: leave the row out where the target has no such attribute, instead of failing.
    """

    target: str
    attribute: str
    make: Callable[[Any], Any]
    why: str
    versions: str
    optional: bool = False

    @property
    def name(self) -> str:
        """``target.attribute``, as messages show it."""
        return f"{self.target.replace(':', '.')}.{self.attribute}"


def constant(value: Any) -> Callable[[Any], Any]:
    """Make a replacement function that returns ``value``, whatever it is called with."""

    def make(original: Any) -> Any:
        def replacement(*_args: Any, **_kwargs: Any) -> Any:
            return value

        return replacement

    return make


def resolve(target: str) -> Any:
    """Import and return the module or class that ``target`` names.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module has no such class.
    """
    module, _, qualname = target.partition(":")
    holder: Any = importlib.import_module(module)
    return reduce(getattr, qualname.split("."), holder) if qualname else holder


def is_for(row: Replacement, version: str) -> bool:
    """Return whether ``row`` is for ``version``; a release candidate counts as its release."""
    return SpecifierSet(row.versions).contains(Version(version).base_version)


def applies(row: Replacement, version: str) -> bool:
    """Return whether ``row`` is for ``version`` and its target has the attribute.

    Raises:
        RuntimeError: the attribute is absent and the row is not optional.
    """
    if not is_for(row, version):
        return False
    try:
        present = hasattr(resolve(row.target), row.attribute)
    except (ImportError, AttributeError):
        present = False
    if present or row.optional:
        return present
    raise RuntimeError(
        f"megatron_async replaces {row.name}, which version {version} of "
        f"{row.target.partition('.')[0]} does not have. The row is for {row.versions}: install "
        "such a version."
    )


def mark(replacement: Any) -> None:
    """Mark what replaces an attribute, so that it is not replaced twice."""
    setattr(replacement, _MARK, True)


def is_replaced(row: Replacement) -> bool:
    """Return whether the row's attribute was replaced by a marked one, see :func:`mark`."""
    return bool(getattr(getattr(resolve(row.target), row.attribute), _MARK, False))


def apply(
    rows: Iterable[Replacement], version: str, *, once: bool = False
) -> tuple[Replacement, ...]:
    """Replace the attributes of ``rows`` that are for ``version``, and return those rows.

    All modules are imported before anything is replaced: one that is imported later would bind
    another module's replacement.

    Args:
        rows: of one table.
        version: of torch or of Megatron.
        once: refuse to replace what is marked already.

    Raises:
        RuntimeError: see :func:`applies`, or an attribute is replaced already. Nothing has been
            replaced then.
    """
    chosen = tuple(row for row in rows if applies(row, version))
    for row in chosen:
        if once and is_replaced(row):
            raise RuntimeError(f"{row.name} is replaced already")
    for row in chosen:
        holder = resolve(row.target)
        setattr(holder, row.attribute, row.make(getattr(holder, row.attribute)))
    return chosen
