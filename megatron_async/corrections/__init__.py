"""Corrections of the update for the delay of its gradient, by name.

Each correction is one file with its rule (:mod:`.error_feedback`, :mod:`.adaptive_error_feedback`,
:mod:`.weight_prediction`, :mod:`.nesterov`, :mod:`.delay_compensation`), on the interface of
:mod:`.base`; the records here need no torch. To add one, write such a file and register a
:class:`Correction`::

    from megatron_async import corrections

    corrections.register(MY_CORRECTION)
"""

from typing import Any

from megatron_async.corrections.correction import (
    ADAPTIVE_STRENGTH,
    MOMENTUM,
    STRENGTH,
    Correction,
    Settings,
)
from megatron_async.registry import Registry

__all__ = ["CORRECTIONS", "NO_CORRECTION", "RECOMMENDED", "Correction", "register"]

NO_CORRECTION = "none"
"""What ``--delay-correction`` calls the lack of one."""

CORRECTIONS: Registry[Correction] = Registry(
    what="delay correction", flag="--delay-correction", none=(NO_CORRECTION,)
)
"""All corrections."""

register = CORRECTIONS.register


def _error_feedback(optimizer: Any, settings: Settings) -> Any:
    if settings[ADAPTIVE_STRENGTH.dest]:
        from megatron_async.corrections.adaptive_error_feedback import AdaptiveErrorFeedback

        return AdaptiveErrorFeedback(optimizer, strength=settings[STRENGTH.dest])
    from megatron_async.corrections.error_feedback import ErrorFeedback

    return ErrorFeedback(optimizer, strength=settings[STRENGTH.dest])


def _weight_prediction(optimizer: Any, settings: Settings) -> Any:
    from megatron_async.corrections.weight_prediction import WeightPrediction

    return WeightPrediction(optimizer, strength=settings[STRENGTH.dest])


def _nesterov(optimizer: Any, settings: Settings) -> Any:
    from megatron_async.corrections.nesterov import Nesterov

    return Nesterov(optimizer, momentum=settings[MOMENTUM.dest])


def _delay_compensation(optimizer: Any, settings: Settings) -> Any:
    from megatron_async.corrections.delay_compensation import DelayCompensation

    return DelayCompensation(
        optimizer,
        strength=settings[STRENGTH.dest],
        adaptive=settings[ADAPTIVE_STRENGTH.dest],
    )


RECOMMENDED = register(
    Correction(
        name="error-feedback",
        summary="adds the difference between this update and the last one",
        build=_error_feedback,
        settings=(STRENGTH, ADAPTIVE_STRENGTH),
        needs_last_update=True,
    )
).name
"""The correction that messages name."""
register(
    Correction(
        name="weight-prediction",
        summary="lets the model compute on weights that are moved once more along the last update, "
        "for each step of delay",
        build=_weight_prediction,
        settings=(STRENGTH,),
        any_delay=True,
        looks_ahead=True,
    )
)
register(
    Correction(
        name="nesterov",
        summary="averages the updates with a momentum and looks ahead along it",
        build=_nesterov,
        settings=(MOMENTUM,),
        any_delay=True,
        has_momentum=True,
    )
)
register(
    Correction(
        name="delay-compensation",
        summary="corrects the gradient to first order, with its own square for the Hessian",
        build=_delay_compensation,
        settings=(STRENGTH, ADAPTIVE_STRENGTH),
        needs_last_update=True,
    )
)
