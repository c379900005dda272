"""By how many steps each mode of a study delays a batch's gradient, read from its flags."""

from collections.abc import Mapping, Sequence

from megatron_async.study.config import Flags, Study

__all__ = ["delay_shares"]


def delay_shares(study: Study) -> Mapping[str, float]:
    """Mean delay over a batch's microbatches, in steps, by the name of the delay.

    Left out are those whose stages differ (``pipedream``, ``paci``), and those whose delayed
    microbatches depend on the pipeline (``--delayed-microbatches fewest``).
    """
    shares = {}
    for mode in study.modes:
        flags = {**study.flags, **mode.flags}
        share = 0.0 if mode.synchronous else _share(flags, study.ranks)
        if share is not None:
            shares[mode.delay] = share
    return shares


def _share(flags: Flags, ranks: int) -> float | None:
    schedule = _one(flags, "pipeline-schedule", "")
    if schedule == "pipedream-2bw":
        return 1.0
    late = _one(flags, "delayed-microbatches", "fewest")
    if schedule != "fresh-2bw" or late == "fewest":
        return None
    if late == "all":
        return 1.0
    if "rampup-batch-size" in flags or "global-batch-size" not in flags:
        return None
    model_parallel = 1
    for dimension in ("pipeline-model", "tensor-model", "context"):
        model_parallel *= int(_one(flags, f"{dimension}-parallel-size", "1"))
    samples = int(_one(flags, "micro-batch-size", "1")) * ranks // model_parallel
    return int(late) * samples / int(_one(flags, "global-batch-size", "1"))


def _one(flags: Flags, name: str, default: str) -> str:
    words: Sequence[str] = flags.get(name, (default,))
    return words[0] if words else ""
