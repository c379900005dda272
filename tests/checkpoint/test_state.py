"""The plain data of an asynchronous run in a checkpoint, in every format that is read."""

from typing import Any

import pytest

from megatron_async.checkpoint.state import FORMAT, leaving_text, packed, unpacked
from tests.checkpoint.old_formats import flat

STATE: dict[str, Any] = {
    "schedule": "pipedream-2bw",
    "batch": 3,
    "weights": {"newest": 3},
    "report": {"batch": 2, "iteration": 3, "grad_norm": 1.5},
    "correction": "error-feedback",
    "correction_settings": {
        "delay_correction_strength": 0.5,
        "delay_correction_adaptive_strength": False,
    },
    "correction_state": {"started": True, "applied": 0.5},
    "counters": {},
}
UNCORRECTED: dict[str, Any] = {
    **STATE,
    "correction": None,
    "correction_settings": {},
    "correction_state": None,
}


@pytest.mark.parametrize("state", [STATE, UNCORRECTED], ids=["corrected", "plain"])
def test_what_is_saved_is_read(state: dict[str, Any]) -> None:
    saved = packed(state)
    assert saved["format"] == FORMAT == 3
    found = unpacked(saved, "here")
    assert {name: found[name] for name in state} == state


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("state", [STATE, UNCORRECTED], ids=["corrected", "plain"])
def test_earlier_formats_are_read(state: dict[str, Any], number: int) -> None:
    found = unpacked(flat(packed(state), number), "here")
    assert found.keys() == state.keys()
    for name in state.keys() - {"correction_settings"}:
        assert found[name] == state[name], name
    # All that they had of the settings.
    strength = state["correction_settings"].get("delay_correction_strength", 1.0)
    assert found["correction_settings"] == {
        "delay_correction_strength": strength,
        "delay_correction_momentum": 0.99,
    }


@pytest.mark.parametrize("number", [0, 4, None])
def test_other_formats_are_refused(number: int | None) -> None:
    saved = {**packed(STATE), "format": number, "package": "9.9"}
    with pytest.raises(
        RuntimeError,
        match=rf"checkpoint in /here has format {number} \(written by megatron_async 9\.9\); .* "
        r"reads formats 1 to 3\. Resume it with the version that wrote it, or .* --finetune",
    ):
        unpacked(saved, "/here")


@pytest.mark.parametrize("saved", [packed(STATE), flat(STATE, 1), flat(STATE, 2)])
def test_what_is_said_where_megatrons_schedule_goes_on(saved: dict[str, Any]) -> None:
    assert leaving_text(saved) == (
        "the checkpoint was saved by pipedream-2bw; Megatron's schedule goes on from its newest "
        "weights, version 3, and the version before is dropped; what the delay correction added "
        "last stays in the weights"
    )
    assert leaving_text(packed(UNCORRECTED)).endswith("the version before is dropped")
