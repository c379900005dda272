"""The modes of the paced benchmarks: what is run is what is simulated."""

import dataclasses

import pytest
from support import megatron_modes
from support.modes import MODES
from support.pace import Pace, ideal_ms
from support.torch_peer import TorchMode, simulate_lists

from megatron_async.schedules.fresh_2bw import DELAYED_MICROBATCHES

PACE = Pace(stages=4, microbatches=12, forward_ms=100, backward_ms=200, optimizer_ms=60)


def ratio(name: str, pace: Pace) -> float:
    return MODES[name].simulated_ms(pace) / ideal_ms(MODES[name], pace)


@pytest.mark.parametrize("name", ["fresh-2bw", "paci"])
def test_options_reach_the_flags_and_the_lists_alike(name: str) -> None:
    pace = dataclasses.replace(PACE, delayed_microbatches=7, extra_warmup=3)
    mode = megatron_modes.MODES[name]
    flags = mode.flags(pace)
    assert flags[:2] == ["--pipeline-schedule", name]
    assert flags[flags.index("--delayed-microbatches") + 1] == "7"
    assert flags[flags.index("--pipeline-extra-warmup") + 1] == "3"
    pipeline = mode.pipeline(pace)
    assert pipeline.value(DELAYED_MICROBATCHES) == 7
    assert pipeline.extra_warmup == 3
    assert mode.impossible(pace) is None
    assert "at least 6" in (
        mode.impossible(dataclasses.replace(pace, delayed_microbatches=5)) or ""
    )


def test_modes_without_an_option_do_without_it() -> None:
    pace = dataclasses.replace(PACE, delayed_microbatches=7, extra_warmup=3)
    for name in ("1f1b", "2bw-misplaced"):
        flags = megatron_modes.MODES[name].flags(pace)
        assert not {"--pipeline-extra-warmup", "--delayed-microbatches"} & set(flags)
    assert "--delayed-microbatches" not in megatron_modes.MODES["2bw"].flags(pace)


def test_latency_is_simulated_and_more_in_flight_hides_it() -> None:
    late = dataclasses.replace(PACE, latency_ms=20)
    for name in ("2bw", "fresh-2bw", "paci"):
        assert ratio(name, PACE) == pytest.approx(1)
        assert ratio(name, late) > 1.1
        assert ratio(name, dataclasses.replace(late, extra_warmup=3)) == pytest.approx(1)
    for name in ("1f1b", "interleaved", "torch-zbv", "torch-zb"):
        assert ratio(name, late) > ratio(name, PACE)


def test_delays() -> None:
    delays = {name: mode.mean_delay(PACE) for name, mode in MODES.items()}
    assert delays["1f1b"] == delays["torch-zbv"] == 0
    assert delays["2bw"] == 1
    assert delays["fresh-2bw"] == pytest.approx(3 / 12)
    # Forwards of 3 microbatches on each stage; backwards of none on the first, of 3 on the last.
    assert delays["paci"] == pytest.approx((4 * 3 + (0 + 1 + 2 + 3)) / 4 / 24)


@pytest.mark.parametrize("microbatches", [4, 8])
def test_lists_of_torch_on_the_clock_of_ours(microbatches: int) -> None:
    """Interleaved 1F1B has p - 1 slots of a chunk of bubble; with three equal parts the zero-bubble
    V waits for nothing but its first forward, which comes p - 1 chunks late to the last rank."""
    pace = dataclasses.replace(PACE, microbatches=microbatches)
    work = microbatches * 300
    interleaved = TorchMode(title="", schedule="ScheduleInterleaved1F1B", v_shaped=False)
    assert interleaved.simulated_ms(pace) == pytest.approx(work + 3 * 150 + 60)
    if microbatches >= 2 * 4 - 1:
        assert MODES["torch-zbv"].simulated_ms(pace) == pytest.approx(work + 3 * 50 + 60)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    lists = TorchMode(title="", schedule="ScheduleInterleaved1F1B", v_shaped=False).lists(PACE)
    lists[1] = [each for each in lists[1] if each.computation_type.name != "SEND_F"]
    with pytest.raises(ValueError, match="wait for each other"):
        simulate_lists(lists, forward=1, backward=2, latency=0)
