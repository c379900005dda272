"""What a rule is, and what it is applied to."""

import argparse
import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from megatron_async.config.settings import AsyncConfig
from megatron_async.megatron import releases
from megatron_async.optimizers import OPTIMIZERS, Optimizer
from megatron_async.schedules.schedule import Pipeline, VersionRule

__all__ = ["Facts", "Rule", "Scope", "Subject", "dest_of", "given", "hybrid_layers", "rule"]


class Scope(enum.Enum):
    """When a rule counts."""

    ALWAYS = "any flag of this package is used"
    ASYNCHRONOUS = "the schedule is asynchronous"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules need and the namespace does not hold."""

    megatron_version: str
    """``megatron.core.__version__``."""
    flags_given: bool = False
    """Whether the command line held a flag of this package, whatever became of it."""

    @classmethod
    def current(cls) -> Self:
        """Those of the Megatron that this process imports."""
        return cls(megatron_version=releases.current())


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

    @property
    def optimizer(self) -> Optimizer | None:
        """What is known of the optimizer; None if nothing is."""
        return OPTIMIZERS.get(self.get("optimizer", ""))

    @property
    def tied(self) -> bool:
        """Whether the input embedding and the output layer share their weight."""
        return not self.get("untie_embeddings_and_output_weights", False)

    @property
    def embedding_copied(self) -> bool:
        """Whether the last of several stages has a copy of the word embedding: in its output layer,
        or for multi-token prediction."""
        return self.tied or bool(self.get("mtp_num_layers"))

    @property
    def pipeline(self) -> Pipeline:
        """What the schedule's lists are made for."""
        return self.config.pipeline(
            stages=self.stages,
            gather_ahead=bool(self.get("overlap_param_gather")),
            replicas=self.replicas * int(self.get("context_parallel_size", 1)),
        )

    @property
    def emulated(self) -> int | None:
        """P, if one stage trains with the delays of P of them."""
        record = self.config.schedule_record
        return None if record is None else record.emulated_stages(self.pipeline)

    def delays(self, microbatches: int) -> list[float]:
        """By how many updates the gradients of each stage are late, emulated stages included; empty
        with an unknown schedule, or a number of stages that makes no sense."""
        record = self.config.schedule_record
        stages = self.emulated or self.stages
        if record is None or stages < 1:
            return []
        rule: VersionRule = record.rule(replace(self.pipeline, stages=stages), microbatches)
        return [rule.staleness(stage) for stage in range(stages)]


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
    remedy: str | Callable[[Subject], str]
    """What to do instead; a sentence."""
    scope: Scope = Scope.ASYNCHRONOUS
    warning: bool = False

    def message(self, subject: Subject) -> str:
        """The flag, the reason, the remedy, on one line."""
        reason, remedy = (
            text if isinstance(text, str) else text(subject) for text in (self.reason, self.remedy)
        )
        return f"{self.flag}: {reason}. {remedy}"


def dest_of(flag: str) -> str:
    """The attribute that argparse makes of ``flag``."""
    return flag.removeprefix("--").replace("-", "_")


def hybrid_layers(subject: Subject) -> frozenset[str]:
    """The kinds of layers in ``--hybrid-layer-pattern``: empty for a GPT.

    Stages (``|``) and the layers that predict further tokens (behind ``/``, which
    ``--mtp-num-layers`` counts) are left out.
    """
    pattern = str(subject.get("hybrid_layer_pattern") or "")
    return frozenset(pattern.partition("/")[0]) - {"|"}


def given(dest: str) -> Callable[[Subject], bool]:
    """Whether ``dest`` has a value at all."""
    return lambda subject: subject.get(dest) is not None


def rule(
    flag: str,
    reason: str | Callable[[Subject], str],
    remedy: str | Callable[[Subject], str] = "Drop it.",
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
