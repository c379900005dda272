"""The releases of megatron-core that the tests run against."""

from typing import Final

from packaging.specifiers import SpecifierSet
from packaging.version import Version

__all__ = [
    "SUPPORTED",
    "TABLE_OF_FLAGS",
    "VERSIONS",
    "before",
    "current",
    "is_supported",
    "series",
    "since",
]

TABLE_OF_FLAGS: Final = "0.19"
"""The series whose flags docs/flags.csv sorts."""

SUPPORTED: Final[tuple[str, ...]] = ("0.18", "0.19", "0.20")
"""Release series (major.minor), the oldest first."""

VERSIONS: Final = ">=0.18.2,<0.21"
"""The same as a specifier of versions, for rows that hold for all of them."""


def since(version: str) -> str:
    """Return the specifier of the supported versions from one on."""
    return f">={version},{VERSIONS.partition(',')[2]}"


def before(version: str) -> str:
    """Return the specifier of the supported versions up to one, which is left out."""
    return f"{VERSIONS.partition(',')[0]},<{version}"


def current() -> str:
    """Return the version of the megatron-core that this process imports."""
    from megatron.core.package_info import __version__

    return str(__version__)


def series(version: str) -> str:
    """Return major.minor of a version such as ``0.19.2+cpu``."""
    return ".".join(version.split("+")[0].split(".")[:2])


def is_supported(version: str) -> bool:
    """Whether a version is of a supported series, a release candidate included."""
    return SpecifierSet(VERSIONS).contains(Version(version).base_version)
