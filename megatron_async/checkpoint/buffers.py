"""The correction's buffers in checkpoints.

In a torch checkpoint they have an entry of their own. Transformer Engine's FusedAdam does not load
a state with a key that it does not know, be it in a Megatron without this package or in a run
without the correction.
"""

from typing import Any

from megatron_async.corrections.base import STATE_PREFIX, correction_of

__all__ = ["BUFFERS", "buffer_keys", "put_back", "take_out"]

BUFFERS = "megatron_async_buffers"
"""Entry of the state dict with the buffers, by their place in the optimizer's state dict."""

type Taken = dict[tuple[Any, ...], dict[str, Any]]


def buffer_keys(optimizer: Any) -> tuple[str, ...]:
    """Return what a distributed optimizer saves and loads of each parameter's state beside its own.

    In the formats that list their keys Megatron drops all others without a word.
    """
    correction = correction_of(optimizer.optimizer)
    if correction is None or not correction.buffered:
        return ()
    return tuple(correction.state_keys)


def take_out(state_dict: Any, taken: Taken, place: tuple[Any, ...] = ()) -> Any:
    """Return a copy of an optimizer's state dict without the buffers, and put them into ``taken``.

    The optimizer's own state, which the state dict refers to, stays as it is.
    """
    if isinstance(state_dict, list):
        return [take_out(value, taken, (*place, i)) for i, value in enumerate(state_dict)]
    if not isinstance(state_dict, dict):
        return state_dict
    own = {key: state_dict[key] for key in state_dict if str(key).startswith(STATE_PREFIX)}
    if own:
        taken[place] = own
    return {
        key: take_out(value, taken, (*place, key))
        for key, value in state_dict.items()
        if key not in own
    }


def put_back(state_dict: Any, taken: Taken) -> None:
    """Undo :func:`take_out`."""
    for place, buffers in taken.items():
        target = state_dict
        for key in place:
            target = target[key]
        target.update(buffers)
