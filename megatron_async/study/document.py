"""YAML documents that are read strictly: files based on others, overrides, checked sections."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

__all__ = ["ConfigError", "Section", "apply_overrides", "check_unique", "read", "show"]

_DEEPEST: Final = 8  # files that are based on one another


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key, the reason and the fix."""


class _Loader(yaml.SafeLoader):
    """YAML, with ``1e-3`` a number, as everywhere but in YAML 1.1, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            line = key_node.start_mark.line + 1
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: the key {key!r} is no text.")
            if key in seen:
                raise ConfigError(f"line {line}: {key} stands there twice.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read(path: Path, *, shown: str, depth: int = 0) -> dict[str, Any]:
    """Read a file, and those it is based on: ``base`` is a path from its folder, or a list of them.

    Mappings are merged key by key, and null removes a key.

    Args:
        path: of the file.
        shown: what messages call it.
        depth: how many files are based on it.

    Raises:
        ConfigError: a file cannot be read, is not YAML, or is no mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = _fresh(yaml.load(text, _Loader))
    except OSError as error:
        raise ConfigError(f"{shown}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown} is not YAML: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{shown}, {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{shown} is not a mapping of keys to values.")
    bases = document.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{shown}: base is {show(bases)}: give a path or a list of paths.")
    if (depth := depth + 1) > _DEEPEST:
        raise ConfigError(f"{shown}: base leads back to itself.")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = _merged(
            merged, read(path.parent / base, shown=f"{shown}: base {base}", depth=depth)
        )
    return _merged(merged, document)


def _fresh(value: Any) -> Any:
    """A copy in which nothing is shared, as aliases in the file would be."""
    if isinstance(value, dict):
        return {key: _fresh(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_fresh(one) for one in value]
    return value


def _merged(base: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the keys of the other; null removes a key."""
    for key, value in own.items():
        if value is None:
            base.pop(key, None)
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            base[key] = _merged(base[key], value)
        else:
            base[key] = value
    return base


def apply_overrides(document: dict[str, Any], overrides: Iterable[str]) -> None:
    """Change a document in place.

    Args:
        document: what was read.
        overrides: ``KEY=VALUE`` with dots between the keys of nested mappings, as
            ``flags.train-iters=50`` or ``seeds=[1]``; the value is YAML, ``null`` removes the key.

    Raises:
        ConfigError: an override has no ``=``, or its place is not a mapping.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(
                f"--set {override}: give KEY=VALUE, for example flags.train-iters=50."
            )
        try:
            value = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {override}: the value is not YAML: {error}") from error
        *parents, last = key.split(".")
        place: Any = document
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {override}: {parent} is not a mapping.")
        if value is None:
            place.pop(last, None)
        else:
            place[last] = value


class Section:
    """A mapping of the document whose keys are all known.

    Each method returns a key's value, and a default where it is missing or null.

    Args:
        value: what should be a mapping.
        place: the keys that lead to it, with dots between them.
        known: the keys it may have.

    Raises:
        ConfigError: it is no mapping, a key is unknown, or, from the methods, a value is wrong or
            is missing and has no default.
    """

    def __init__(self, value: Any, *, place: str, known: Sequence[str]) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place or 'the file'} has to be a mapping, not {show(value)}.")
        self._place = f"{place}." if place else ""
        for key in value:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}."
                raise ConfigError(f"{self._place}{key} is unknown: {hint}")
        self._values = value

    def get(self, key: str, default: Any = None) -> Any:
        """Whatever it is."""
        value = self._values.get(key)
        return default if value is None else value

    def wrong(self, key: str, expected: str) -> ConfigError:
        """The error that a value is not what was expected."""
        value = self._values.get(key)
        what = "is missing" if value is None else f"is {show(value)}"
        return ConfigError(f"{self._place}{key} {what}: give {expected}.")

    def text(self, key: str, *, default: str | None) -> str | None:
        """A text, or the default."""
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def choice(self, key: str, choices: Sequence[str], *, default: str) -> str:
        """One of the choices."""
        value = self.get(key, default)
        if value not in choices:
            raise self.wrong(key, f"one of {', '.join(choices)}")
        return str(value)

    def integer(self, key: str, *, default: int, least: int) -> int:
        """An integer that is large enough."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, *, default: float) -> float:
        """A number that is not negative."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.wrong(key, "a number that is not negative")
        return float(value)

    def list(self, key: str, default: Any = None) -> Sequence[Any]:
        """A list with at least one entry."""
        value = self.get(key, default)
        if not isinstance(value, list) or not value:
            raise self.wrong(key, "a list with at least one entry")
        return value

    def mapping(self, key: str) -> Mapping[str, Any]:
        """A mapping with at least one key."""
        value = self.get(key)
        if not isinstance(value, Mapping) or not value:
            raise self.wrong(key, "a mapping with at least one key")
        return value

    def integers(self, key: str, *, least: int) -> Sequence[int]:
        """Different integers, none below ``least``."""
        values = self.list(key)
        if any(isinstance(one, bool) or not isinstance(one, int) or one < least for one in values):
            raise self.wrong(key, f"a list of integers from {least} on")
        check_unique(values, place=f"{self._place}{key}")
        return values

    def numbers(self, key: str) -> Sequence[float]:
        """Different numbers."""
        values = self.list(key)
        if any(isinstance(one, bool) or not isinstance(one, int | float) for one in values):
            raise self.wrong(key, "a list of numbers")
        numbers = [float(one) for one in values]
        check_unique(numbers, place=f"{self._place}{key}")
        return numbers

    def names(self, key: str) -> tuple[str, ...] | None:
        """Texts; None if the key is missing."""
        if self.get(key) is None:
            return None
        values = self.list(key)
        if any(not isinstance(one, str) for one in values):
            raise self.wrong(key, "a list of names")
        return tuple(values)


def check_unique(values: Sequence[object], *, place: str) -> None:
    """Refuse values that stand there twice.

    Raises:
        ConfigError: one does.
    """
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{place}: {value} stands there twice.")


def show(value: Any) -> str:
    """A value in a message: not too long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
