"""Optimizers by name: Megatron's own, and those that it lacks.

Adan, MARS in its AdamW form, NAdamW and NorMuon are from here; their classes are in :mod:`.adan`,
:mod:`.mars`, :mod:`.nadamw` and :mod:`.normuon`, and :mod:`.entries` puts them into Megatron's
registry, from where Megatron builds, wraps and saves them like its own. Of Megatron's optimizers
the records say what the checks and the planner need. To add one, write its class and register an
:class:`Optimizer`::

    from megatron_async import optimizers

    optimizers.register(MY_OPTIMIZER)

Nothing here imports torch or Megatron before a record's functions are called.
"""

import argparse
import math
from typing import Any

from megatron_async.optimizers.optimizer import Optimizer
from megatron_async.registry import Flag, Registry

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "add_optimizer_arguments",
    "own_names",
    "register",
    "requested",
]

OPTIMIZERS: Registry[Optimizer] = Registry(what="optimizer", flag="--optimizer")
"""All that is known of."""

register = OPTIMIZERS.register


def _decay(name: str, default: float, text: str) -> Flag:
    return Flag(
        name=name,
        parse=float,
        default=default,
        help=f"{text} Default: {default}.",
        fits=lambda value: 0.0 <= value < 1.0,
        takes="a number of at least 0 and below 1",
    )


def _amount(name: str, default: float, text: str) -> Flag:
    return Flag(
        name=name,
        parse=float,
        default=default,
        help=f"{text} Default: {default}.",
        fits=lambda value: 0.0 <= value < math.inf,
        takes="a finite number of at least 0",
    )


def _adan() -> Any:
    from megatron_async.optimizers.entries import adan

    return adan()


def _mars() -> Any:
    from megatron_async.optimizers.entries import mars

    return mars()


def _nadamw() -> Any:
    from megatron_async.optimizers.entries import nadamw

    return nadamw()


def _normuon() -> Any:
    from megatron_async.optimizers.entries import normuon

    return normuon()


def _adaptive_muon_runs() -> bool:
    """Megatron 0.19 is written for emerging-optimizers 0.2.0, which is not on PyPI.

    Its ``TensorParallelAdaptiveMuon`` skips the constructor of ``AdaptiveMuon``, which from 0.3 on
    sets attributes that the step reads.
    """
    try:
        from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon
        from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon
    except ImportError:
        return True
    sets = TensorParallelAdaptiveMuon.__init__.__code__.co_names
    return not hasattr(AdaptiveMuon, "_apply_muon_scale") or "scale_mode" in sets


register(
    Optimizer(
        name="adam",
        title="AdamW",
        momentum_flag="--adam-beta1",
        momentum_optional=True,
        sensitive=True,
        state_bytes=(8, 8),
    )
)
register(
    Optimizer(
        name="sgd",
        title="SGD",
        momentum_flag="--sgd-momentum",
        momentum_optional=True,
        state_bytes=(4, 4),
    )
)
# Muon keeps Adam's state for everything that is not a layer's matrix.
register(Optimizer(name="muon", title="Muon", momentum_flag="--muon-momentum", state_bytes=(4, 8)))
register(
    Optimizer(name="dist_muon", title="Muon", momentum_flag="--muon-momentum", state_bytes=(4, 8))
)
register(
    Optimizer(
        name="adaptive_muon",
        title="adaptive Muon",
        momentum_flag="--muon-momentum",
        runs=_adaptive_muon_runs,
    )
)
register(
    Optimizer(
        name="soap",
        title="SOAP",
        momentum_flag="--adam-beta1",
        saved_in_torch_dist=False,
        # Settings that Megatron's OptimizerConfig has and its command line lacks.
        flags=(
            Flag(
                name="--soap-shampoo-beta",
                parse=float,
                default=0.95,
                help="Decay rate of SOAP's Kronecker factors. Default: 0.95.",
            ),
            Flag(
                name="--soap-use-kl-shampoo",
                switch=True,
                negatable=True,
                default=True,
                help="Whether SOAP uses the factors of KL-Shampoo, Megatron's default. The "
                "published SOAP is --no-soap-use-kl-shampoo.",
            ),
        ),
    )
)
register(
    Optimizer(
        name="lion",
        title="Lion",
        momentum_flag="--lion-beta1",
        sign_update=True,
        state_bytes=(4, 4),
    )
)
register(
    Optimizer(
        name="adan",
        title="Adan",
        entry=_adan,
        momentum_flag="--adan-beta1",
        flags=(
            _decay("--adan-beta1", 0.98, "Decay rate of Adan's average of gradients."),
            _decay("--adan-beta2", 0.92, "Decay rate of Adan's average of gradient changes."),
            _decay(
                "--adan-beta3",
                0.99,
                "Decay rate of Adan's average of squared look-ahead gradients.",
            ),
            _amount("--adan-eps", 1e-8, "Added to Adan's denominator."),
        ),
    )
)
register(
    Optimizer(
        name="mars",
        title="MARS",
        entry=_mars,
        momentum_flag="--mars-beta1",
        sensitive=True,
        flags=(
            _decay("--mars-beta1", 0.95, "Decay rate of MARS's first moment."),
            _decay("--mars-beta2", 0.99, "Decay rate of MARS's second moment."),
            _amount("--mars-eps", 1e-8, "Added to MARS's denominator."),
            _amount(
                "--mars-gamma",
                0.025,
                "Strength of MARS's variance reduction; 0 leaves AdamW with clipping.",
            ),
        ),
    )
)
register(
    Optimizer(
        name="nadamw",
        title="NAdamW",
        entry=_nadamw,
        momentum_flag="--nadamw-beta1",
        state_bytes=(8, 8),
        # The setting of arXiv 2505.01099.
        flags=(
            _decay("--nadamw-beta1", 0.99, "Decay rate of NAdamW's average of gradients."),
            _decay("--nadamw-beta2", 0.999, "Decay rate of NAdamW's average of their squares."),
            _amount("--nadamw-eps", 1e-8, "Added to NAdamW's denominator."),
            _amount(
                "--nadamw-momentum-decay",
                0.004,
                "How fast NAdamW's momentum grows from half of --nadamw-beta1 to all of it.",
            ),
        ),
    )
)
register(
    Optimizer(
        name="normuon",
        title="NorMuon",
        entry=_normuon,
        momentum_flag="--muon-momentum",
        flags=(
            _decay("--normuon-beta2", 0.95, "Decay rate of NorMuon's second moment of rows."),
            _amount("--normuon-eps", 1e-10, "Added to NorMuon's denominators."),
            Flag(
                name="--normuon-update-rms",
                parse=float,
                help="Root mean square of the elements of NorMuon's update, ahead of the learning "
                "rate: 0.2 in the paper. By default the update has the norm of Muon's, which "
                "--muon-scale-mode and --muon-extra-scale-factor set; NorMuon reads these and "
                "Muon's other flags.",
                fits=lambda value: value is None or 0.0 < value < math.inf,
                takes="a finite number above 0",
            ),
        ),
    )
)


def own_names() -> tuple[str, ...]:
    """What ``--optimizer`` takes beside Megatron's own names."""
    return tuple(record.name for record in OPTIMIZERS if record.entry is not None)


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all records, and let ``--optimizer`` take :func:`own_names` too.

    A flag that the parser has already is left as it is. Megatron restricts ``--optimizer`` to the
    names it knows, whatever its registry holds; a parser without that flag is left without it.

    Args:
        parser: Megatron's parser with its own flags, or an empty one.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(title="megatron_async optimizers")
    for flag in OPTIMIZERS.flags.values():
        if flag.name not in parser._option_string_actions:
            flag.add_to(group)
    action = parser._option_string_actions.get("--optimizer")
    if action is not None and action.choices is not None:
        known = list(action.choices)
        action.choices = known + [name for name in own_names() if name not in known]
    return parser


def requested(argv: list[str]) -> bool:
    """Whether a command line asks for an optimizer from here, or for a flag of one.

    Args:
        argv: the arguments, without the program's name.
    """
    parser = add_optimizer_arguments(argparse.ArgumentParser(add_help=False))
    flags = set(parser._option_string_actions)
    chosen = [
        value
        for index, argument in enumerate(argv)
        for value in (
            [argument.partition("=")[2]]
            if argument.startswith("--optimizer=")
            else argv[index + 1 : index + 2]
            if argument == "--optimizer"
            else []
        )
    ]
    return bool(set(chosen) & set(own_names())) or any(a.partition("=")[0] in flags for a in argv)
