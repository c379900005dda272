"""Records by name, and the flags that belong to them."""

import argparse
from dataclasses import dataclass, replace

import pytest

from megatron_async.corrections import CORRECTIONS
from megatron_async.optimizers import OPTIMIZERS
from megatron_async.registry import Flag, Registry
from megatron_async.schedules import SCHEDULES


@dataclass(frozen=True)
class Thing:
    name: str
    flags: tuple[Flag, ...] = ()


SIZE = Flag(name="--thing-size", parse=int, default=1, help="how large", takes="an integer")


@pytest.fixture
def things() -> Registry[Thing]:
    found: Registry[Thing] = Registry(what="thing", flag="--thing", none=("nothing",))
    found.register(Thing("ball", (SIZE,)))
    found.register(Thing("bell"))
    return found


def test_records_are_found_by_name_in_the_order_of_their_registration(
    things: Registry[Thing],
) -> None:
    assert things.names == ("nothing", "ball", "bell")
    assert [thing.name for thing in things] == ["ball", "bell"]
    assert len(things) == 2
    assert things["bell"] == things.get("bell") == Thing("bell")
    assert "bell" in things
    assert "nothing" not in things
    assert things.get("nothing") is None


def test_registering_returns_the_record(things: Registry[Thing]) -> None:
    drum = Thing("drum")
    assert things.register(drum) is drum
    assert things["drum"] is drum


@pytest.mark.parametrize("name", ["ball", "nothing"])
def test_a_name_that_is_taken_is_refused(things: Registry[Thing], name: str) -> None:
    with pytest.raises(ValueError, match=f"a thing named '{name}' exists already"):
        things.register(Thing(name))
    assert len(things) == 2


def test_an_unknown_name_lists_what_there_is(things: Registry[Thing]) -> None:
    with pytest.raises(
        ValueError, match="--thing drum: there is no such thing; there are: nothing, ball, bell"
    ):
        things["drum"]
    with pytest.raises(ValueError, match="--thing nothing: there is no such thing"):
        things["nothing"]


def test_a_flag_is_shared_by_those_that_mean_the_same(things: Registry[Thing]) -> None:
    things.register(Thing("drum", (SIZE,)))
    assert list(things.flags.items()) == [("thing_size", SIZE)]
    assert things.owners("thing_size") == ["ball", "drum"]
    assert things.owners("thing_colour") == []


def test_a_flag_with_another_meaning_is_refused(things: Registry[Thing]) -> None:
    for changes in ({"default": 2}, {"help": "how loud"}, {"parse": float}):
        other = Thing("drum", (replace(SIZE, **changes),))
        with pytest.raises(ValueError, match="'drum': the flag --thing-size belongs to another"):
            things.register(other)
    assert "drum" not in things


def test_a_record_can_be_removed(things: Registry[Thing]) -> None:
    things.unregister("ball")
    assert things.names == ("nothing", "bell")
    assert things.flags == {}
    things.register(Thing("ball", (replace(SIZE, default=3),)))
    assert things.flags["thing_size"].default == 3
    with pytest.raises(KeyError):
        things.unregister("drum")


def test_removing_a_record_while_going_through_them_is_safe(things: Registry[Thing]) -> None:
    for thing in things:
        things.unregister(thing.name)
    assert len(things) == 0


@pytest.mark.parametrize(
    ("flag", "argv", "value"),
    [
        (SIZE, [], 1),
        (SIZE, ["--thing-size", "3"], 3),
        (Flag(name="--loud", help="", switch=True, default=False), [], False),
        (Flag(name="--loud", help="", switch=True, default=False), ["--loud"], True),
        (Flag(name="--loud", help="", switch=True, negatable=True, default=None), [], None),
        (Flag(name="--loud", help="", switch=True, negatable=True), ["--no-loud"], False),
        (Flag(name="--hue", help="", choices=("red", "blue"), default="red"), [], "red"),
        (Flag(name="--hue", help="", choices=("red", "blue")), ["--hue", "blue"], "blue"),
    ],
)
def test_a_flag_adds_itself_to_a_parser(flag: Flag, argv: list[str], value: object) -> None:
    parser = argparse.ArgumentParser()
    flag.add_to(parser)
    assert getattr(parser.parse_args(argv), flag.dest) == value


def test_a_flag_is_fit_for_anything_by_default() -> None:
    assert SIZE.fits(-1)
    assert Flag(name="--a-b-c", help="").dest == "a_b_c"


def test_the_packages_flags_are_described_and_their_defaults_fit() -> None:
    for registry in (SCHEDULES, CORRECTIONS, OPTIMIZERS):
        for flag in registry.flags.values():
            assert flag.name.startswith("--")
            assert len(flag.help) > 20
            assert flag.fits(flag.default), flag.name
            # What does not fit is refused with this.
            assert flag.takes or flag.choices or flag.switch or flag.dest == "soap_shampoo_beta"


def test_a_value_that_cannot_be_read_is_told_by_what_the_flag_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    SIZE.add_to(parser)
    assert parser.parse_args(["--thing-size", "3"]).thing_size == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--thing-size", "big"])
    assert "argument --thing-size: 'big' is not an integer" in capsys.readouterr().err
