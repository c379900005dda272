"""Megatron, ``megatron.training`` included, on CPU ranks over gloo.

To use it, before anything of Megatron is imported::

    from megatron_async import cpu_backend

    sys.argv[1:] = cpu_backend.apply_argument_defaults(sys.argv[1:])
    cpu_backend.install()

Importing this module replaces nothing. :func:`install` replaces attributes of torch and of Megatron
in this process only; :func:`replacements` lists them with their reasons.
"""

import logging
import os
import sys

from megatron_async.cpu_backend.flags import cpu_argv
from megatron_async.megatron import dataset_helpers, releases
from megatron_async.megatron.replaced import Replacement, apply

__all__ = [
    "Replacement",
    "apply_argument_defaults",
    "cpu_argv",
    "install",
    "install_fused_kernels",
    "installed",
    "replacements",
]

# GPU packages that Megatron uses where it finds them.
HIDDEN_PACKAGES = (
    "apex",
    "deep_ep",
    "flash_attn",
    "flash_attn_3",
    "flashinfer",
    "transformer_engine",
    "transformer_engine_torch",
)

_applied: tuple[Replacement, ...] | None = None
_fused: tuple[Replacement, ...] | None = None


def replacements() -> list[Replacement]:
    """Return the whole table: torch's rows first, then ``torch.distributed``'s and Megatron's.

    Imports torch, not Megatron.
    """
    from megatron_async.cpu_backend.distributed_rows import distributed_rows
    from megatron_async.cpu_backend.megatron_rows import megatron_rows
    from megatron_async.cpu_backend.one_rank import one_rank_rows
    from megatron_async.cpu_backend.torch_rows import torch_rows

    return [*torch_rows(), *distributed_rows(), *one_rank_rows(), *megatron_rows()]


def installed() -> bool:
    """Return whether :func:`install` has been called in this process."""
    return _applied is not None


def install() -> tuple[Replacement, ...]:
    """Make torch and Megatron run on the host in this process; a second call does nothing.

    Hides the machine's GPUs and the packages in ``HIDDEN_PACKAGES``, turns torch.compile off, and
    applies the rows of :func:`replacements` that are for the installed versions.

    Returns:
        The rows that were applied.

    Raises:
        RuntimeError: Megatron was imported or a GPU used before, or a version is not supported.
    """
    global _applied
    if _applied is not None:
        return _applied
    early = sorted(name for name in sys.modules if name.startswith("megatron."))
    if early:
        raise RuntimeError(
            f"cpu_backend.install() came too late: {early[0]} was imported before. Modules of "
            "Megatron bind torch's functions and decide on GPU packages when they are imported. "
            "Call install() earlier, ahead of the first Megatron import."
        )
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "cpu_backend.install() came too late: this process has used a GPU. Call install() "
            "before the first CUDA call."
        )
    rows = replacements()
    of_torch = [row for row in rows if row.target.startswith("torch")]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # Megatron insists on it for tensor and context parallelism; without a GPU it is nothing.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    for package in HIDDEN_PACKAGES:
        sys.modules[package] = None  # type: ignore[assignment]
    applied = apply(of_torch, torch.__version__)

    from megatron.core.package_info import __version__ as megatron_version

    if not releases.is_supported(megatron_version):
        raise RuntimeError(
            f"the CPU backend does not know megatron-core {megatron_version}: install one that is "
            f"{releases.VERSIONS}."
        )
    # On a GPU, dropout must not touch the host's generator. Here it does, and Megatron's tracker
    # says so at every fork.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
    dataset_helpers.provide()
    applied += apply([row for row in rows if row not in of_torch], megatron_version)
    _applied = applied
    return applied


def install_fused_kernels() -> tuple[Replacement, ...]:
    """Replace chains of small operators by torch's fused ones; a second call does nothing.

    Losses agree with Megatron's own operators to rounding, not digit for digit; see
    :mod:`.fused_kernels`.

    Returns:
        The rows that were applied.

    Raises:
        RuntimeError: :func:`install` was not called before.
    """
    global _fused
    if _fused is None:
        if _applied is None:
            raise RuntimeError("call cpu_backend.install() ahead of install_fused_kernels()")
        from megatron.core.package_info import __version__ as megatron_version

        from megatron_async.cpu_backend.fused_kernels import fused_rows

        _fused = apply(fused_rows(), megatron_version)
    return _fused


def apply_argument_defaults(argv: list[str]) -> list[str]:
    """Return ``argv`` with the flags that CPU ranks need, and say on rank 0 which were added.

    Args:
        argv: the script's arguments, before Megatron parses them.

    Raises:
        ValueError: see :func:`cpu_argv`.
    """
    argv, added = cpu_argv(argv)
    if added and os.environ.get("RANK", "0") == "0":
        print(f"megatron_async: --cpu added {' '.join(added)}", flush=True)
    return argv
