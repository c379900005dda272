"""What counts as the bubble: waits for other stages, within iterations."""

import time
from typing import Any

import pytest
import torch

from megatron_async import hooks
from megatron_async.cpu_backend.torch_rows import Event
from megatron_async.runtime.counters.bubble import BubbleLog, IdleMeter, TimedRequest
from megatron_async.runtime.run import run

PAUSE = 0.05  # seconds; a sleep lasts at least so long


@pytest.fixture(autouse=True)
def events_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def idle_of(meter: IdleMeter) -> float:
    """Idle seconds of the iteration that ends here."""
    meter.close_iteration()
    return meter.close_iteration()[0]


class Late:
    """A receive that arrives late."""

    def wait(self) -> str:
        time.sleep(PAUSE)
        return "arrived"

    def is_completed(self) -> bool:
        return False


def test_waits_count() -> None:
    meter = IdleMeter()
    with meter.waiting():
        time.sleep(PAUSE)
    assert idle_of(meter) >= PAUSE
    assert idle_of(meter) == 0


def test_the_wait_for_a_request_counts_where_it_is_waited_for() -> None:
    meter = IdleMeter()
    request = TimedRequest(Late(), meter)
    assert not request.is_completed()
    assert idle_of(meter) == 0
    assert request.wait() == "arrived"
    assert idle_of(meter) >= PAUSE


def test_evaluations_and_checkpoints_do_not_count() -> None:
    started = time.perf_counter()
    meter = IdleMeter()
    with meter.paused():
        with meter.paused(), meter.waiting():
            time.sleep(PAUSE)
        meter.add_host_seconds(1.0)
        # An update that was still to be launched is launched here, and ends the iteration.
        meter.close_iteration()
        with meter.waiting():
            time.sleep(PAUSE)
    with meter.waiting():
        pass
    idle, before = meter.close_iteration()
    assert idle == 0
    idle, after = meter.close_iteration()
    assert 0 <= idle <= after
    assert before + after <= time.perf_counter() - started - 2 * PAUSE


@pytest.mark.parametrize("at_once", [True, False])
def test_receives_of_interleaved_schedules_count(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hand the requests of `_communicate` on and wait for them later."""
    tensor = torch.zeros(1)

    def communicate(self: Any, *, recv_prev: bool, recv_next: bool, wait_on_reqs: bool) -> Any:
        if wait_on_reqs:
            Late().wait()
            return tensor, None, None
        return tensor, None, {"recv_prev": Late(), "send_next": Late()}

    (hook,) = [one for one in hooks.HOOKS if one.attribute == "_communicate"]
    measured = BubbleLog()
    monkeypatch.setattr(run, "bubble", measured)
    received, nothing, requests = hook.make(communicate)(
        None, recv_prev=True, recv_next=False, wait_on_reqs=at_once
    )
    assert (received is tensor, nothing) == (True, None)
    if not at_once:
        idle_of(measured.meter)
        requests["send_next"].wait()
        assert idle_of(measured.meter) == 0
        requests["recv_prev"].wait()
    assert idle_of(measured.meter) >= PAUSE
