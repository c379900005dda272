"""When the share of the correction is measured."""

from typing import Any

import pytest

from megatron_async.runtime.counters.correction_ratio import CorrectionRatio
from megatron_async.runtime.counters.counter import Counters


class Correction:
    measure = False


@pytest.mark.parametrize(("interval", "measured"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_it_is_measured_where_it_is_logged(interval: int, measured: list[int]) -> None:
    corrections: Any = [Correction(), Correction()]
    counters = Counters([CorrectionRatio(corrections, interval=interval)])
    found = []
    for iteration in range(1, 7):
        counters.before_update(iteration)
        assert len({each.measure for each in corrections}) == 1
        if corrections[0].measure:
            found.append(iteration)
    assert found == measured
