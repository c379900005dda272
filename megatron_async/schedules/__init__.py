"""Pipeline schedules by name.

``--pipeline-schedule default`` is Megatron's own selection; the schedules that it selects from have
records here as well, and so has ZB-H1, to be planned, drawn and compared with. Each schedule is
one file with one :class:`Schedule`. To add one, write such a file and register its record::

    from megatron_async import schedules

    schedules.register(MY_SCHEDULE)

Nothing here needs torch: the runtime that interprets the lists is :mod:`megatron_async.runtime`.
"""

from megatron_async.registry import Registry
from megatron_async.schedules.fresh_2bw import FRESH_2BW
from megatron_async.schedules.interleaved import INTERLEAVED
from megatron_async.schedules.one_f_one_b import ONE_F_ONE_B
from megatron_async.schedules.paci import PACI
from megatron_async.schedules.pipedream import PIPEDREAM
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW
from megatron_async.schedules.schedule import Schedule
from megatron_async.schedules.zero_bubble_h1 import ZERO_BUBBLE_H1

__all__ = ["DEFAULT", "RECOMMENDED", "SCHEDULES", "Schedule", "asynchronous_names", "register"]

DEFAULT = "default"
"""What ``--pipeline-schedule`` calls Megatron's own selection."""

RECOMMENDED = FRESH_2BW.name
"""The asynchronous schedule that messages and defaults name."""

SCHEDULES: Registry[Schedule] = Registry(
    what="pipeline schedule", flag="--pipeline-schedule", none=(DEFAULT,)
)
"""Megatron's own, one that Megatron lacks and that is planned alone, and those of this package."""

register = SCHEDULES.register

for _schedule in (
    ONE_F_ONE_B,
    INTERLEAVED,
    ZERO_BUBBLE_H1,
    FRESH_2BW,
    PIPEDREAM_2BW,
    PACI,
    PIPEDREAM,
):
    register(_schedule)


def asynchronous_names() -> tuple[str, ...]:
    """What ``--pipeline-schedule`` takes."""
    return (DEFAULT, *(schedule.name for schedule in SCHEDULES if schedule.asynchronous))
