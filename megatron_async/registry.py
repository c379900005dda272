"""Named things that a run can choose from, and the flags that belong to them.

Schedules, delay corrections and optimizers are records in a :class:`Registry` each. The command
line, the checks, the planner, the study and the documentation go through the registries; nothing
else knows the names. A package of one's own adds a record by ``register``, ahead of
:func:`megatron_async.install` or in the training script itself.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Flag", "Named", "Registry"]


def _anything(value: Any) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Flag:
    """A command-line flag that belongs to one or several records.

    Attributes:
        name: with its dashes.
        help: for ``--help``.
        default: without the flag.
        parse: makes the value of the flag's text; not used for a switch. It raises ValueError where
            it cannot.
        metavar: how ``--help`` names the value.
        choices: the only values, if they are few.
        switch: whether the bare flag turns something on.
        negatable: whether a switch has a form with ``--no-``.
        fits: whether a value makes sense.
        takes: what makes sense, for the message: "a number of at least 0 and below 1".
        idle: a value with which the record that it belongs to does nothing, if there is one.
    """

    name: str
    help: str
    default: Any = None
    parse: Callable[[str], Any] = str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    switch: bool = False
    negatable: bool = False
    fits: Callable[[Any], bool] = _anything
    takes: str = ""
    idle: Any = None

    @property
    def dest(self) -> str:
        """The attribute that argparse makes of it."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: Any) -> None:
        """Add it to a parser or a group of one."""
        if self.switch:
            action: Any = argparse.BooleanOptionalAction if self.negatable else "store_true"
            group.add_argument(self.name, action=action, default=self.default, help=self.help)
            return
        group.add_argument(
            self.name,
            type=self._value if self.takes else self.parse,
            default=self.default,
            metavar=self.metavar,
            choices=self.choices,
            help=self.help,
        )

    def _value(self, text: str) -> Any:
        try:
            return self.parse(text)
        except ValueError:
            expected = self.takes.partition(";")[0]
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


class Named(Protocol):
    """What a registry holds."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def flags(self) -> tuple[Flag, ...]:
        """The flags that mean something with it."""


class Registry[T: Named]:
    """Records of one kind by name, in the order in which they were registered.

    Args:
        what: what a record is, for messages.
        flag: the flag that takes the name.
        none: names that the flag takes and that have no record.
    """

    def __init__(self, *, what: str, flag: str, none: tuple[str, ...] = ()) -> None:
        self.what = what
        self.flag = flag
        self.none = none
        self._records: dict[str, T] = {}

    def register(self, record: T) -> T:
        """Add a record and return it.

        Raises:
            ValueError: the name is taken, or a flag of its name means something else elsewhere.
        """
        if record.name in self or record.name in self.none:
            raise ValueError(f"a {self.what} named {record.name!r} exists already")
        for flag in record.flags:
            known = self.flags.get(flag.dest)
            if known is not None and known != flag:
                raise ValueError(
                    f"{self.what} {record.name!r}: the flag {flag.name} belongs to another "
                    f"{self.what} with another meaning; name it otherwise"
                )
        self._records[record.name] = record
        return record

    def unregister(self, name: str) -> None:
        """Remove a record, for tests that register one of their own."""
        del self._records[name]

    def __contains__(self, name: object) -> bool:
        return name in self._records

    def __getitem__(self, name: str) -> T:
        """Return the record of a name.

        Raises:
            ValueError: there is none; the message names the flag and what it takes.
        """
        if name not in self._records:
            raise ValueError(
                f"{self.flag} {name}: there is no such {self.what}; there are: "
                f"{', '.join(self.names)}"
            )
        return self._records[name]

    def get(self, name: str) -> T | None:
        """Return the record of a name, None if there is none."""
        return self._records.get(name)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._records.values()))

    def __len__(self) -> int:
        return len(self._records)

    @property
    def names(self) -> tuple[str, ...]:
        """What the flag takes."""
        return (*self.none, *self._records)

    @property
    def flags(self) -> Mapping[str, Flag]:
        """The flags of all records by their ``dest``, each once."""
        return {flag.dest: flag for record in self for flag in record.flags}

    def owners(self, dest: str) -> list[str]:
        """Return the names of the records that a flag belongs to."""
        return [record.name for record in self if any(flag.dest == dest for flag in record.flags)]
