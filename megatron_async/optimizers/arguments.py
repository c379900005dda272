"""The flags of the optimizers that this package adds to Megatron, and ``--optimizer`` itself."""

import argparse
from typing import Any, Final

__all__ = ["NAMES", "add_optimizer_arguments", "extend_optimizer_choices", "requested"]

NAMES: Final[tuple[str, ...]] = ("adan", "mars", "normuon")
"""What ``--optimizer`` takes beside Megatron's own names."""

_FLOAT_FLAGS: Final[tuple[tuple[str, float, str], ...]] = (
    ("--adan-beta1", 0.98, "Decay rate of Adan's average of gradients."),
    ("--adan-beta2", 0.92, "Decay rate of Adan's average of gradient changes."),
    ("--adan-beta3", 0.99, "Decay rate of Adan's average of squared look-ahead gradients."),
    ("--adan-eps", 1e-8, "Added to Adan's denominator."),
    ("--mars-beta1", 0.95, "Decay rate of MARS's first moment."),
    ("--mars-beta2", 0.99, "Decay rate of MARS's second moment."),
    ("--mars-eps", 1e-8, "Added to MARS's denominator."),
    ("--mars-gamma", 0.025, "Strength of MARS's variance reduction; 0 leaves AdamW with clipping."),
    ("--normuon-beta2", 0.95, "Decay rate of NorMuon's second moment of rows."),
    ("--normuon-eps", 1e-10, "Added to NorMuon's denominators."),
)


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of Adan, MARS and NorMuon, and extend ``--optimizer`` where it is defined.

    Also adds flags for two settings of Megatron's SOAP that its ``OptimizerConfig`` has and its
    command line lacks, with Megatron's defaults; Megatron reads them by their name. A flag that
    the parser has already is left as it is.

    Args:
        parser: Megatron's parser with its own flags, or an empty one.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group(title="megatron_async optimizers")
    for flag, default, text in _FLOAT_FLAGS:
        group.add_argument(flag, type=float, default=default, help=f"{text} Default: {default}.")
    group.add_argument(
        "--normuon-update-rms",
        type=float,
        default=None,
        help="Root mean square of the elements of NorMuon's update, ahead of the learning rate: "
        "0.2 in the paper. By default the update has the norm of Muon's, which --muon-scale-mode "
        "and --muon-extra-scale-factor set; NorMuon reads these and Muon's other flags.",
    )
    _add_if_missing(
        parser,
        group,
        "--soap-shampoo-beta",
        type=float,
        default=0.95,
        help="Decay rate of SOAP's Kronecker factors. Default: 0.95.",
    )
    _add_if_missing(
        parser,
        group,
        "--soap-use-kl-shampoo",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Whether SOAP uses the factors of KL-Shampoo, Megatron's default. The published SOAP "
        "is --no-soap-use-kl-shampoo.",
    )
    extend_optimizer_choices(parser)
    return parser


def _add_if_missing(
    parser: argparse.ArgumentParser, group: Any, flag: str, **definition: Any
) -> None:
    if flag not in parser._option_string_actions:
        group.add_argument(flag, **definition)


def extend_optimizer_choices(parser: argparse.ArgumentParser) -> None:
    """Let ``--optimizer`` take :data:`NAMES` too; a parser without that flag is left alone.

    Megatron restricts the flag to the names it knows, whatever its registry holds.
    """
    action = parser._option_string_actions.get("--optimizer")
    if action is not None and action.choices is not None:
        known = list(action.choices)
        action.choices = known + [name for name in NAMES if name not in known]


def requested(argv: list[str]) -> bool:
    """Whether a command line asks for an optimizer or a flag of this module.

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
    return bool(set(chosen) & set(NAMES)) or any(a.partition("=")[0] in flags for a in argv)
