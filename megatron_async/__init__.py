"""Asynchronous pipeline training for NVIDIA Megatron.

``python -m megatron_async SCRIPT ARGS`` runs a training script with the flags of this package. In
one's own script, call :func:`install` ahead of all Megatron imports.
"""

from megatron_async.version import __version__

__all__ = ["__version__", "install"]


def install() -> None:
    """Install the hooks in this process. A second call does nothing.

    Raises:
        RuntimeError: called too late, or Megatron's release is not supported.
    """
    from megatron_async import hooks

    hooks.install()
