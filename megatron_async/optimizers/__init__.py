"""Optimizers that Megatron lacks: Adan, MARS in its AdamW form, and NorMuon.

:func:`add_optimizer_arguments` adds their flags and lets ``--optimizer`` name them;
:func:`register` puts them into Megatron's registry, from where Megatron builds, wraps and saves
them like its own. Neither imports torch or Megatron before it is called; the classes are in
:mod:`.adan`, :mod:`.mars` and :mod:`.normuon`.
"""

from megatron_async.optimizers.arguments import (
    NAMES,
    add_optimizer_arguments,
    extend_optimizer_choices,
    requested,
)
from megatron_async.optimizers.registry import register

__all__ = [
    "NAMES",
    "add_optimizer_arguments",
    "extend_optimizer_choices",
    "register",
    "requested",
]
