"""What a rule is, and what it is applied to."""

import argparse
import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Self

from megatron_async.arguments import CORRECTIONS, SCHEDULES, AsyncConfig

__all__ = ["TESTED_MEGATRON", "Facts", "Rule", "Scope", "Subject", "given", "rule"]

TESTED_MEGATRON: Final[tuple[str, ...]] = ("0.19",)
"""Releases (major.minor) of megatron-core that the tests run against."""


class Scope(enum.Enum):
    """When a rule counts."""

    ALWAYS = "any flag of this package is used"
    ASYNCHRONOUS = "the schedule is asynchronous"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules need and the namespace does not hold."""

    megatron_version: str
    """``megatron.core.__version__``."""
    schedules: Collection[str] = SCHEDULES
    """Names that ``--pipeline-schedule`` takes."""
    corrections: Collection[str] = CORRECTIONS
    """Names that ``--delay-correction`` takes."""
    flags_given: bool = False
    """Whether the command line held a flag of this package, whatever became of it."""
    adaptive_muon_runs: bool = True
    """Whether Megatron's adaptive_muon fits the emerging-optimizers that is installed."""

    @classmethod
    def current(cls) -> Self:
        """Those of the Megatron that this process imports."""
        from megatron.core.package_info import __version__

        return cls(megatron_version=__version__, adaptive_muon_runs=_adaptive_muon_runs())


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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the rules are applied to."""

    args: argparse.Namespace
    config: AsyncConfig
    facts: Facts
    overlays: tuple[object, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """Attribute ``name`` of the overlays or else of the arguments; ``default`` if neither has
        it, as in releases of Megatron that lack the flag."""
        for overlay in self.overlays:
            if hasattr(overlay, name):
                return getattr(overlay, name)
        return getattr(self.args, name, default)

    @property
    def stages(self) -> int:
        """p, the number of pipeline stages."""
        return int(self.get("pipeline_model_parallel_size", 1))

    @property
    def replicas(self) -> int:
        """Ranks of a stage that read different microbatches."""
        # Megatron's data_parallel_size leaves out the ranks among which weights are only sharded.
        return int(self.get("data_parallel_size", 1)) * int(self.get("gtp_weight_remat_size", 1))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing to check."""

    name: str
    """Unique."""
    flag: str
    """The flag that the message names first."""
    applies: Callable[[Subject], bool]
    """Whether the arguments are at fault."""
    reason: str | Callable[[Subject], str]
    """Why it cannot be run; no full stop at the end."""
    remedy: str
    """What to do instead; a sentence."""
    scope: Scope = Scope.ASYNCHRONOUS
    warning: bool = False

    def message(self, subject: Subject) -> str:
        """The flag, the reason, the remedy, on one line."""
        reason = self.reason if isinstance(self.reason, str) else self.reason(subject)
        return f"{self.flag}: {reason}. {self.remedy}"


def dest_of(flag: str) -> str:
    """The attribute that argparse makes of ``flag``."""
    return flag.removeprefix("--").replace("-", "_")


def given(dest: str) -> Callable[[Subject], bool]:
    """Whether ``dest`` has a value at all."""
    return lambda subject: subject.get(dest) is not None


def rule(
    flag: str,
    reason: str | Callable[[Subject], str],
    remedy: str = "Drop it.",
    *,
    when: Callable[[Subject], bool] | None = None,
    name: str = "",
    dest: str = "",
    scope: Scope = Scope.ASYNCHRONOUS,
    warning: bool = False,
) -> Rule:
    """A rule on ``flag``; ``when`` defaults to its value being true: set, above 0, not empty."""
    attribute = dest or dest_of(flag)
    return Rule(
        name=name or attribute,
        flag=flag,
        applies=(lambda subject: bool(subject.get(attribute))) if when is None else when,
        reason=reason,
        remedy=remedy,
        scope=scope,
        warning=warning,
    )
