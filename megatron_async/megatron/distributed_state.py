"""The state of a parameter that the distributed optimizer of Megatron 0.18 gathers and scatters.

For the torch format and ``dp_zero_gather_scatter``, 0.18 names the entries in the code: the main
parameter, ``exp_avg`` and ``exp_avg_sq``; what else an optimizer keeps is dropped when saving and
missed when loading. Later releases ask ``optimizer_state_keys``. Here Megatron's own functions run
once more for each further pair of entries, which they find under the names that they know.

Source: megatron/core/optimizer/distrib_optimizer.py, ``get_parameter_state_dp_zero``,
``load_parameter_state_from_dp_zero`` and ``load_state_dict``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import batched
from typing import Any

import torch

__all__ = ["gather", "load", "scatter"]

_KNOWN = ("exp_avg", "exp_avg_sq")


def gather(
    original: Callable[..., Any], optimizer: Any, keys: Sequence[str], **options: Any
) -> Any:
    """Gather a distributed optimizer's state with further entries.

    Args:
        original: ``get_parameter_state_dp_zero``.
        optimizer: the distributed optimizer.
        keys: the entries of each parameter's state beside Megatron's, of its shape, in fp32.
        options: of ``original``.

    Returns:
        For each gradient buffer and dtype the flat tensors by key, on the host, on the ranks on
        which ``original`` returns them; None on the others.
    """
    state = original(optimizer, **options)
    of_parameter = optimizer._get_main_param_and_optimizer_states
    for pair in batched(keys, len(_KNOWN)):

        def renamed(parameter: Any, pair: Sequence[str] = pair) -> dict[str, torch.Tensor]:
            tensors = of_parameter(parameter)
            return {
                "param": tensors["param"],
                **dict.fromkeys(_KNOWN, tensors[pair[0]]),
                **{known: tensors[key] for known, key in zip(_KNOWN, pair, strict=False)},
            }

        with _replaced(optimizer, "_get_main_param_and_optimizer_states", renamed):
            further = original(optimizer, **options)
        for tensors, named in _both(state, further):
            tensors.update({key: named[known] for known, key in zip(_KNOWN, pair, strict=False)})
    return state


def scatter(
    original: Callable[..., Any], optimizer: Any, keys: Sequence[str], state: Any, **options: Any
) -> None:
    """Undo :func:`gather`: put what rank 0 of the replicas has into every rank's shards.

    Args:
        original: ``load_parameter_state_from_dp_zero``.
        optimizer: the distributed optimizer, whose parameters' states have all entries.
        keys: as for :func:`gather`.
        state: what :func:`gather` returned, on rank 0.
        options: of ``original``.
    """
    shards: dict[Any, dict[str, torch.Tensor]] = {}

    def collect(parameter: Any, tensors: dict[str, torch.Tensor]) -> None:
        shards.setdefault(parameter, {}).update(tensors)

    with _replaced(optimizer, "_set_main_param_and_optimizer_states", collect):
        original(optimizer, state, **options)
    for pair in batched(keys, len(_KNOWN)):

        def collect_renamed(
            parameter: Any, tensors: dict[str, torch.Tensor], pair: Sequence[str] = pair
        ) -> None:
            named = {key: tensors[known] for known, key in zip(_KNOWN, pair, strict=False)}
            shards[parameter].update(named)

        with _replaced(optimizer, "_set_main_param_and_optimizer_states", collect_renamed):
            original(optimizer, _with_pair(state, pair), **options)
    for parameter, tensors in shards.items():
        optimizer._set_main_param_and_optimizer_states(parameter, tensors)


def load(
    original: Callable[..., Any], optimizer: Any, keys: Sequence[str], state_dict: Any
) -> None:
    """Load a distributed optimizer's state with further entries.

    Megatron replaces the parameters' states by empty ones, in which it makes the entries that it
    knows, and in some formats loads into these at once.

    Args:
        original: ``load_state_dict``.
        optimizer: the distributed optimizer.
        keys: as for :func:`gather`.
        state_dict: what ``original`` takes.
    """
    replace_states = optimizer.optimizer.load_state_dict

    def with_further(states: Any) -> None:
        replace_states(states)
        for state in optimizer.optimizer.state.values():
            like = state.get(_KNOWN[0])
            if like is not None:
                for key in keys:
                    state[key] = torch.empty_like(like, dtype=torch.float32)

    with _replaced(optimizer.optimizer, "load_state_dict", with_further):
        original(optimizer, state_dict)


def _both(state: Any, further: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The tensors of each gradient buffer and dtype, of two states of one layout."""
    for buffer in () if state is None else state:
        if isinstance(state[buffer], dict):
            for dtype in state[buffer]:
                yield state[buffer][dtype], further[buffer][dtype]


def _with_pair(state: Any, pair: Sequence[str]) -> Any:
    """The state with a pair of entries under the names that Megatron knows."""
    if state is None:
        return None
    return {
        buffer: {
            dtype: {
                **tensors,
                **dict.fromkeys(_KNOWN, tensors[pair[0]]),
                **{known: tensors[key] for known, key in zip(_KNOWN, pair, strict=False)},
            }
            for dtype, tensors in dtypes.items()
        }
        if isinstance(dtypes, dict)
        else dtypes
        for buffer, dtypes in state.items()
    }


@contextmanager
def _replaced(holder: Any, method: str, replacement: Any) -> Iterator[None]:
    setattr(holder, method, replacement)
    try:
        yield
    finally:
        delattr(holder, method)
