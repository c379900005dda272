"""Late messages: both sides know when a transfer ends, whichever came to it first."""

import threading
import time
from pathlib import Path

import pytest
from support.late_messages import Table

LATE = 0.05


@pytest.fixture
def tables(tmp_path: Path) -> list[Table]:
    return [Table(tmp_path / "messages", rank=rank, ranks=2, seconds=LATE) for rank in range(2)]


def test_a_message_arrives_late_after_both_have_come_to_it(tables: list[Table]) -> None:
    sender, receiver = tables
    sent = sender.send("forward", 1)
    posted = receiver.receive("forward", 0)
    came = time.monotonic()
    posted.wait()
    assert time.monotonic() >= came + LATE - 1e-3
    sent.wait()


def test_the_nth_of_a_channel_is_the_nth_for_both(tables: list[Table]) -> None:
    """Other channels, and the other direction, count for themselves."""
    sender, receiver = tables
    first, second = sender.send("forward", 1), sender.send("forward", 1)
    sender.send("backward", 1)
    receiver.send("forward", 0)
    ends: list[float] = []

    def wait() -> None:
        second.wait()
        ends.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    receiver.receive("forward", 0)
    first.wait()
    assert not ends  # The receiver has come to the first one alone.
    came = time.monotonic()
    receiver.receive("forward", 0)
    waiting.join(timeout=30)
    assert ends
    assert ends[0] >= came + LATE


def test_what_was_posted_long_before_arrives_late_after_it_was_sent(tables: list[Table]) -> None:
    sender, receiver = tables
    sender.send("total", 1)
    sent = time.monotonic()
    time.sleep(LATE)
    receiver.receive("total", 0).wait_sent()
    assert time.monotonic() - sent >= LATE - 1e-3
