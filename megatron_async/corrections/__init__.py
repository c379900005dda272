"""Corrections of the update for the delay of its gradient, by name.

:mod:`.catalogue` says what there is and needs no torch; :mod:`.base` has the interface. Each
correction is one file: :mod:`.error_feedback`, :mod:`.adaptive_error_feedback`,
:mod:`.weight_prediction`, :mod:`.nesterov`, :mod:`.delay_compensation`.
"""

from collections.abc import Callable
from typing import Any

from megatron_async.corrections.catalogue import CATALOGUE

__all__ = ["correction_names", "make_correction", "register"]

_CORRECTIONS: dict[str, Callable[..., Any]] = {}


def register(name: str, build: Callable[..., Any]) -> None:
    """Add a correction. ``build`` takes what :func:`make_correction` passes on.

    Raises:
        ValueError: the name is taken.
    """
    if name in _CORRECTIONS or name == "none":
        raise ValueError(f"a delay correction named {name!r} exists already")
    _CORRECTIONS[name] = build


def correction_names() -> list[str]:
    """Return the names that ``--delay-correction`` takes beside ``none``."""
    return sorted(_CORRECTIONS)


def make_correction(
    name: str,
    optimizer: Any,
    *,
    strength: float = 1.0,
    momentum: float = 0.99,
    adaptive_strength: bool = False,
) -> Any:
    """Build the correction of one torch optimizer; it acts once it is enabled.

    Args:
        name: one of :func:`correction_names`.
        optimizer: the innermost torch optimizer, which holds the main parameters or their shards.
        strength: factor of the correction.
        momentum: of ``nesterov``; the others ignore it.
        adaptive_strength: adapt the strength to each element, where the correction can.

    Returns:
        A :class:`~megatron_async.corrections.base.DelayCorrection`.

    Raises:
        ValueError: there is no correction of that name, or it does not have such a setting.
        TypeError: the optimizer is not a ``torch.optim.Optimizer``.
    """
    if name not in _CORRECTIONS:
        raise ValueError(
            f"--delay-correction {name}: no such correction; there are: none, "
            f"{', '.join(correction_names())}"
        )
    if adaptive_strength and not CATALOGUE[name].adapts:
        raise ValueError(f"--delay-correction {name} has no adaptive strength")
    return _CORRECTIONS[name](
        optimizer, strength=strength, momentum=momentum, adaptive_strength=adaptive_strength
    )


# Imported when a run begins: the names are used where torch is not.


def _error_feedback(
    optimizer: Any, *, strength: float, momentum: float, adaptive_strength: bool
) -> Any:
    if adaptive_strength:
        from megatron_async.corrections.adaptive_error_feedback import AdaptiveErrorFeedback

        return AdaptiveErrorFeedback(optimizer, strength=strength)
    from megatron_async.corrections.error_feedback import ErrorFeedback

    return ErrorFeedback(optimizer, strength=strength)


def _weight_prediction(optimizer: Any, *, strength: float, **_: Any) -> Any:
    from megatron_async.corrections.weight_prediction import WeightPrediction

    return WeightPrediction(optimizer, strength=strength)


def _nesterov(optimizer: Any, *, momentum: float, **_: Any) -> Any:
    from megatron_async.corrections.nesterov import Nesterov

    return Nesterov(optimizer, momentum=momentum)


def _delay_compensation(
    optimizer: Any, *, strength: float, momentum: float, adaptive_strength: bool
) -> Any:
    from megatron_async.corrections.delay_compensation import DelayCompensation

    return DelayCompensation(optimizer, strength=strength, adaptive=adaptive_strength)


register("error-feedback", _error_feedback)
register("weight-prediction", _weight_prediction)
register("nesterov", _nesterov)
register("delay-compensation", _delay_compensation)
