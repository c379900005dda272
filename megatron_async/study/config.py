"""The configuration of a study: a YAML file, read strictly.

Everything a file can say, with the default where there is one (docs/study.md tells it at length)::

    base: other.yaml            # read first, from this file's folder: a path or a list of them;
                                # mappings are merged key by key, null removes a key
    name: NAME                  # default: the file's
    description: one line
    device: cpu                 # or gpu
    ranks: 1                    # processes of one run, on one machine
    launcher: torchrun ...      # starts a run instead of torchrun on this machine
    script: pretrain_gpt.py     # default: the one of this package
    dataset: stdlib             # or mock, {package: NAME} or {files: [PATH, ...]} as bytes,
                                # {prefix: PATH}
    flags: {num-layers: 4, ...} # Megatron's, of all runs; train-iters is needed
    min-lr-ratio: 0.1           # the final learning rate over the peak
    optimizers:
      NAME:
        flags: {optimizer: adam, ...}
        learning-rates: [1e-3, 3e-3]
        momentum: {flag: adam-beta1, values: [0.8, 0.9]}  # optional: one variant for each
    delays: [none, one-step]    # none: synchronous; one-step: pipedream-2bw; a schedule's name;
                                # pipedream-16: of 16 stages; {name: NAME, flags: {...}}
    corrections: [none, error-feedback]  # {name: NAME, strengths: [...], flags: {...},
                                #  delays: [...], optimizers: [...]}
    seeds: [1, 2, 3]
    checkpoints: {interval: 1000, keep: false}  # none by default; lets a stopped run go on
    tuning: {seed: 1, per-mode: false}  # false: every learning rate is a column of the grid

A flag's value is what Megatron takes; ``true`` gives the bare flag, ``false`` leaves it out, a list
gives several values.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from megatron_async.corrections import CORRECTIONS
from megatron_async.corrections.correction import STRENGTH
from megatron_async.schedules import SCHEDULES, asynchronous_names
from megatron_async.schedules.emulation import EMULATE_PIPELINE_STAGES
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Pipeline
from megatron_async.study.document import (
    ConfigError,
    Section,
    apply_overrides,
    check_unique,
    read,
    show,
)

__all__ = [
    "NONE",
    "ConfigError",
    "Dataset",
    "Flags",
    "Mode",
    "Study",
    "Variant",
    "dump",
    "flag_words",
    "load",
    "parse",
    "shipped",
]

NONE: Final = "none"
"""The name of no delay, and of no correction."""

# A flag's name without dashes in front: its words. Empty: the bare flag.
type Flags = Mapping[str, tuple[str, ...]]

_CONFIGS = Path(__file__).with_name("configs")

# Flags that the study sets itself, and where to say it instead.
_RESERVED: Final[Mapping[str, str]] = {
    "lr": "optimizers.NAME.learning-rates",
    "min-lr": "min-lr-ratio",
    "seed": "seeds",
    "data-path": "dataset",
    "mock-data": "dataset: mock",
    "pipeline-schedule": "delays",
    **{flag.name.removeprefix("--"): "delays" for flag in SCHEDULES.flags.values()},
    "delay-correction": "corrections",
    **{flag.name.removeprefix("--"): "corrections" for flag in CORRECTIONS.flags.values()},
    "async-start-iteration": "delays",
    "log-interval": "nothing: the study reads every iteration's line",
    "train-samples": "flags.train-iters",
    "cpu": "device",
    "save": "checkpoints",
    "load": "checkpoints",
    "save-interval": "checkpoints",
    "data-cache-path": "nothing: each run has a folder of its own for it",
}
_LAYER_RESERVED: Final = frozenset({"lr", "min-lr", "seed", "data-path", "mock-data"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
_EMULATED = re.compile(r"(.+)-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """What the runs are trained on.

    Attributes:
        kind: ``stdlib``, ``package``, ``mock``, ``files`` or ``prefix``.
        paths: the files, directories and globs, the one package, or the one prefix.
    """

    kind: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An optimizer, at one momentum where momenta are compared.

    Attributes:
        name: unique, for example ``muon`` or ``muon-m0.95``.
        optimizer: its key in the file.
        momentum: None unless the file compares momenta.
        flags: Megatron's.
        learning_rates: peaks, rising; one of them is chosen, or all are run.
    """

    name: str
    optimizer: str
    momentum: float | None
    flags: Flags
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A delay and a correction of it.

    Attributes:
        delay: its name; :data:`NONE` is synchronous training.
        correction: its name.
        flags: Megatron's and ours.
        optimizers: keys of the optimizers that are run in it; None for all.
    """

    delay: str
    correction: str
    flags: Flags
    optimizers: tuple[str, ...] | None = None

    @property
    def synchronous(self) -> bool:
        """Whether there is no delay."""
        return self.delay == NONE


@dataclass(frozen=True, kw_only=True)
class Study:
    """A checked configuration.

    Attributes:
        name: of the file, without its suffix.
        iterations: of each run.
        tuning_seed: of the runs that choose a learning rate; None if all rates are run.
        tuned_per_mode: whether each mode has runs of its own that choose it; otherwise synchronous
            runs choose for all.
        checkpoint_interval: iterations between a run's checkpoints; None for no checkpoints.
        keep_checkpoints: whether those of finished runs are kept.
        document: what was read, to be written down beside the results.
    """

    name: str
    description: str
    device: str
    ranks: int
    launcher: str | None
    script: Path | None
    dataset: Dataset
    flags: Flags
    iterations: int
    min_lr_ratio: float
    variants: tuple[Variant, ...]
    modes: tuple[Mode, ...]
    seeds: tuple[int, ...]
    tuning_seed: int | None
    tuned_per_mode: bool
    checkpoint_interval: int | None
    keep_checkpoints: bool
    document: Mapping[str, Any] = field(repr=False)


def shipped() -> dict[str, Path]:
    """The configurations of this package by name."""
    return {path.stem: path for path in sorted(_CONFIGS.glob("*.yaml"))}


def load(source: str, *, overrides: Sequence[str] = ()) -> Study:
    """Read a configuration.

    Args:
        source: a path, or the name of a shipped configuration.
        overrides: see :func:`~.document.apply_overrides`.

    Raises:
        ConfigError: it cannot be read, or says something wrong.
    """
    path = Path(source)
    if not path.suffix and source in shipped():
        path = shipped()[source]
    if not path.exists():
        known = ", ".join(shipped())
        raise ConfigError(f"there is no file {source}: give one, or a shipped name, of {known}.")
    document = read(path, shown=source)
    apply_overrides(document, overrides)
    try:
        return parse(document, name=path.stem)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def dump(study: Study) -> str:
    """The document as YAML; :func:`load` reads it back to an equal study."""
    document = {"name": study.name, **study.document}
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


def flag_words(flags: Flags) -> list[str]:
    """The words of a command line, in the order of the flags."""
    return [word for name, words in flags.items() for word in (f"--{name}", *words)]


def parse(document: Mapping[str, Any], *, name: str) -> Study:
    """Check a document and make a study of it.

    Raises:
        ConfigError: a key is unknown or missing, or a value is wrong.
    """
    top = Section(
        document,
        place="",
        known=(
            *("name", "description", "device", "ranks", "launcher", "script", "dataset", "flags"),
            *("min-lr-ratio", "optimizers", "delays", "corrections", "seeds", "tuning"),
            *("checkpoints",),
        ),
    )
    device = top.choice("device", ("cpu", "gpu"), default="cpu")
    ranks = top.integer("ranks", default=1, least=1)
    flags = _flags(top.get("flags", {}), place="flags", reserved=frozenset(_RESERVED))
    if len(flags.get("train-iters", ())) != 1 or not flags["train-iters"][0].isdigit():
        raise ConfigError("flags.train-iters is missing: give the number of iterations of a run.")
    iterations = int(flags["train-iters"][0])
    dataset = _dataset(top.get("dataset", "stdlib"))
    seeds = tuple(top.integers("seeds", least=1))  # Megatron takes no other
    variants = _variants(top.mapping("optimizers"))
    delays = [_delay(entry, index) for index, entry in enumerate(top.list("delays"))]
    check_unique([delay.delay for delay in delays], place="delays")
    corrections = _corrections(top.list("corrections", default=[NONE]))
    modes = _modes(delays, corrections, optimizers=_keys_of(variants))
    interval, keep = _checkpoints(top.get("checkpoints"))
    tuning_seed, per_mode = _tuning(top.get("tuning", {}), seeds)
    script = top.text("script", default=None)
    if script is not None and not Path(script).is_file():
        raise ConfigError(f"script: there is no file {script}.")
    return Study(
        name=top.text("name", default=name) or name,
        description=top.text("description", default="") or "",
        device=device,
        ranks=ranks,
        launcher=top.text("launcher", default=None),
        script=None if script is None else Path(script).resolve(),
        dataset=dataset,
        flags=flags,
        iterations=iterations,
        min_lr_ratio=top.number("min-lr-ratio", default=0.1),
        variants=variants,
        modes=modes,
        seeds=seeds,
        tuning_seed=tuning_seed,
        tuned_per_mode=per_mode,
        checkpoint_interval=interval,
        keep_checkpoints=keep,
        document=document,
    )


@dataclass(frozen=True, kw_only=True)
class _Correction:
    name: str
    flags: Flags
    delays: tuple[str, ...] | None
    optimizers: tuple[str, ...] | None


def _flags(value: Any, *, place: str, reserved: frozenset[str]) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place} has to be a mapping of flags to values, not {show(value)}.")
    flags: dict[str, tuple[str, ...]] = {}
    for key, one in value.items():
        name = str(key).removeprefix("--").replace("_", "-")
        if name in reserved:
            raise ConfigError(
                f"{place}.{key}: the study sets this flag; say it under {_RESERVED[name]}."
            )
        if name in flags:
            raise ConfigError(f"{place}.{key} stands there twice.")
        if one is None or one is False:
            continue
        words = one if isinstance(one, list) else [] if one is True else [one]
        if any(isinstance(word, bool) or not isinstance(word, str | int | float) for word in words):
            raise ConfigError(
                f"{place}.{key} is {show(one)}: give a text, a number, a list or true."
            )
        flags[name] = tuple(str(word) for word in words)
    return flags


def _dataset(value: Any) -> Dataset:
    if value in ("stdlib", "mock"):
        return Dataset(kind=value)
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ConfigError(
            f"dataset is {show(value)}: give stdlib, mock, {{package: NAME}}, "
            "{files: [PATH, ...]} or {prefix: PATH}."
        )
    section = Section(value, place="dataset", known=("package", "files", "prefix"))
    package = section.text("package", default=None)
    if package is not None:
        return Dataset(kind="package", paths=(package,))
    files = section.names("files")
    if files is not None:
        return Dataset(kind="files", paths=files)
    prefix = section.text("prefix", default=None)
    if prefix is None:
        raise section.wrong("prefix", "the path of the .bin and .idx files without their suffix")
    return Dataset(kind="prefix", paths=(prefix.removesuffix(".bin").removesuffix(".idx"),))


def _variants(optimizers: Mapping[str, Any]) -> tuple[Variant, ...]:
    variants: list[Variant] = []
    for name, value in optimizers.items():
        _check_name(name, place="optimizers")
        place = f"optimizers.{name}"
        section = Section(value, place=place, known=("flags", "learning-rates", "momentum"))
        flags = _flags(section.get("flags", {}), place=f"{place}.flags", reserved=_LAYER_RESERVED)
        flags.setdefault("optimizer", (name,))
        rates = tuple(sorted(section.numbers("learning-rates")))
        if rates[0] <= 0:
            raise section.wrong("learning-rates", "positive numbers")
        if section.get("momentum") is None:
            variants.append(
                Variant(name=name, optimizer=name, momentum=None, flags=flags, learning_rates=rates)
            )
            continue
        momentum = Section(
            section.get("momentum"), place=f"{place}.momentum", known=("flag", "values")
        )
        flag = momentum.text("flag", default=None)
        if flag is None:
            raise momentum.wrong("flag", "the flag of Megatron that sets it, as adam-beta1")
        variants += [
            Variant(
                name=f"{name}-m{value:g}",
                optimizer=name,
                momentum=value,
                flags={**flags, flag.removeprefix("--"): (f"{value:g}",)},
                learning_rates=rates,
            )
            for value in momentum.numbers("values")
        ]
    check_unique([variant.name for variant in variants], place="optimizers")
    return tuple(variants)


def _delay(entry: Any, index: int) -> Mode:
    place = f"delays[{index}]"
    if isinstance(entry, str):
        if entry == NONE:
            return Mode(delay=NONE, correction=NONE, flags={})
        schedule = PIPEDREAM_2BW.name if entry == "one-step" else entry
        if schedule in asynchronous_names()[1:]:
            flags: Flags = {"pipeline-schedule": (schedule,)}
            return Mode(delay=entry, correction=NONE, flags=flags)
        match = _EMULATED.fullmatch(entry)
        if match and match[1] in SCHEDULES.owners(EMULATE_PIPELINE_STAGES.dest):
            stages = EMULATE_PIPELINE_STAGES.name.removeprefix("--")
            flags = {"pipeline-schedule": (match[1],), stages: (match[2],)}
            return Mode(delay=entry, correction=NONE, flags=flags)
        raise ConfigError(
            f"{place}: {entry} is unknown: give none, one-step, "
            f"{', '.join(asynchronous_names()[1:])}, pipedream-STAGES, or "
            "{name: NAME, flags: {...}}."
        )
    section = Section(entry, place=place, known=("name", "flags"))
    name = section.text("name", default=None)
    if name is None or section.get("flags") is None:
        raise section.wrong("name" if name is None else "flags", "both name and flags")
    _check_name(name, place=place)
    own = _flags(section.get("flags"), place=f"{place}.flags", reserved=_LAYER_RESERVED)
    if name == NONE and "pipeline-schedule" in own:
        raise ConfigError(f"{place}: none is the synchronous schedule; name this delay otherwise.")
    return Mode(delay=name, correction=NONE, flags=own)


def _corrections(entries: Sequence[Any]) -> list[_Correction]:
    found: list[_Correction] = []
    for index, entry in enumerate(entries):
        place = f"corrections[{index}]"
        section = Section(
            {"name": entry} if isinstance(entry, str) else entry,
            place=place,
            known=("name", "flags", "strengths", "delays", "optimizers"),
        )
        name = section.text("name", default=None)
        if name is None:
            raise section.wrong("name", "a name")
        _check_name(name, place=place)
        flags = _flags(section.get("flags", {}), place=f"{place}.flags", reserved=_LAYER_RESERVED)
        known = CORRECTIONS.names
        if name in CORRECTIONS:
            flags = {"delay-correction": (name,), **flags}
        elif name != NONE and not flags:
            raise ConfigError(
                f"{place}: {name} is unknown: give one of {', '.join(known)}, or flags with it."
            )
        variants: list[tuple[str, Flags]] = [(name, flags)]
        if section.get("strengths") is not None:
            variants = [
                (f"{name}-{value:g}", {**flags, STRENGTH.name.removeprefix("--"): (f"{value:g}",)})
                for value in section.numbers("strengths")
            ]
        found += [
            _Correction(
                name=each,
                flags=own,
                delays=section.names("delays"),
                optimizers=section.names("optimizers"),
            )
            for each, own in variants
        ]
    check_unique([correction.name for correction in found], place="corrections")
    return found


def _modes(
    delays: Sequence[Mode], corrections: Sequence[_Correction], *, optimizers: Sequence[str]
) -> tuple[Mode, ...]:
    names = [delay.delay for delay in delays]
    for correction in corrections:
        for chosen, known in ((correction.delays, names), (correction.optimizers, optimizers)):
            for one in chosen or ():
                if one not in known:
                    raise ConfigError(
                        f"corrections: {correction.name} is for {one}, which is none of "
                        f"{', '.join(known)}."
                    )
    modes: list[Mode] = []
    for delay in delays:
        # Without a delay there is nothing to correct.
        if delay.synchronous:
            modes.append(delay)
            continue
        chosen_here = [
            correction
            for correction in corrections
            if correction.delays is None or delay.delay in correction.delays
        ]
        for correction in chosen_here:
            record = CORRECTIONS.get("".join(correction.flags.get("delay-correction", ())))
            if record is not None and not record.any_delay and _is_longer(delay.flags):
                raise ConfigError(
                    f"corrections: {correction.name} is defined for a delay of one step, not for "
                    f"{delay.delay}: give {{name: {correction.name}, delays: [one-step]}}."
                )
        modes += [
            Mode(
                delay=delay.delay,
                correction=correction.name,
                flags={**delay.flags, **correction.flags},
                optimizers=correction.optimizers,
            )
            for correction in chosen_here
        ]
    if not modes:
        raise ConfigError("delays and corrections leave nothing to run.")
    return tuple(modes)


def _is_longer(flags: Flags) -> bool:
    """Whether the delays of a schedule exceed one step, or differ between stages."""
    schedule = SCHEDULES.get("".join(flags.get("pipeline-schedule", ())))
    if schedule is None:
        return False
    emulated = flags.get(EMULATE_PIPELINE_STAGES.name.removeprefix("--"))
    stages = int(emulated[0]) if emulated else 2
    rule = schedule.rule(Pipeline(stages=stages), stages)
    return max(rule.staleness(stage) for stage in range(stages)) > 1 or (
        rule.staleness(0) != rule.staleness(stages - 1)
    )


def _tuning(value: Any, seeds: Sequence[int]) -> tuple[int | None, bool]:
    if value is False:
        return None, False
    section = Section({} if value is True else value, place="tuning", known=("seed", "per-mode"))
    seed = section.get("seed", seeds[0])
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 1:
        raise section.wrong("seed", "an integer from 1 on")
    per_mode = section.get("per-mode", False)
    if not isinstance(per_mode, bool):
        raise section.wrong("per-mode", "true or false")
    return seed, per_mode


def _checkpoints(value: Any) -> tuple[int | None, bool]:
    if value is None:
        return None, False
    section = Section(value, place="checkpoints", known=("interval", "keep"))
    if section.get("interval") is None:
        raise section.wrong("interval", "a number of iterations")
    keep = section.get("keep", False)
    if not isinstance(keep, bool):
        raise section.wrong("keep", "true or false")
    return section.integer("interval", default=0, least=1), keep


def _keys_of(variants: Sequence[Variant]) -> list[str]:
    return list(dict.fromkeys(variant.optimizer for variant in variants))


def _check_name(name: Any, *, place: str) -> None:
    # Names make up the names of folders.
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{place}: {show(name)} is no name: use letters, digits, and . + - between them."
        )
