"""The releases of megatron-core that the tests run against."""

from typing import Final

__all__ = ["SUPPORTED", "VERSIONS", "current", "is_supported", "series"]

SUPPORTED: Final[tuple[str, ...]] = ("0.19",)
"""Release series (major.minor)."""

VERSIONS: Final = ">=0.19,<0.20"
"""The same as a specifier of versions, for rows that hold for all of them."""


def current() -> str:
    """Return the version of the megatron-core that this process imports."""
    from megatron.core.package_info import __version__

    return str(__version__)


def series(version: str) -> str:
    """Return major.minor of a version such as ``0.19.2+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_supported(version: str) -> bool:
    """Whether a version is of a supported series."""
    return series(version) in SUPPORTED
