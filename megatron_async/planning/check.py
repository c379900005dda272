"""``--check``: the counted parameters beside those of the model that Megatron builds."""

import sys

from megatron_async.planning.built import built_parameters
from megatron_async.planning.memory import Layout, ModelShape, count_parameters
from megatron_async.planning.tables import print_table

__all__ = ["check"]


def check(shape: ModelShape, layout: Layout) -> int:
    """Build each stage, print both numbers of one rank, and return the exit code: 1 if they
    differ, or if Megatron refuses the model."""
    try:
        [built] = built_parameters([(shape, layout)])
    except RuntimeError as error:
        print(f"\n--check: {error}", file=sys.stderr)
        return 1
    rows = [["parameters of one rank", "counted", "built by Megatron"]]
    wrong = False
    for stage, there in enumerate(built):
        counted = count_parameters(shape, layout, stage).total
        wrong |= counted != there
        rows.append([f"stage {stage}", f"{counted:,}", f"{there:,}"])
    print()
    print_table(rows)
    print("They differ: please report it." if wrong else "They are equal.")
    return int(wrong)
