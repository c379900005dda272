"""Names for people: commands of the device's queues, and the actions that they belong to."""

from megatron_async.replay.commands import Command, Kind
from megatron_async.replay.trace import Begin, Communication, Kernel, Synchronize, Wait, WaitEvent

__all__ = ["action_name", "describe"]


def action_name(action: Begin | None, *, numbers: bool) -> str:
    """For example ``launch_update`` or, with numbers, ``launch_update of batch 3``."""
    if action is None:
        return "outside of actions"
    if not numbers or action.batch < 0:
        return action.action
    microbatch = f", microbatch {action.microbatch}" if action.microbatch >= 0 else ""
    return f"{action.action} of batch {action.batch}{microbatch}"


def describe(command: Command, *, numbers: bool = False) -> str:
    """For example ``reduce (launch_update)``.

    Args:
        command: any.
        numbers: name the batch and the microbatch, too.
    """
    action = action_name(command.action, numbers=numbers)
    match command.item:
        case Communication() as item:
            what = "+".join(sorted({each.name for each in item.operations}))
            if command.kind is Kind.WAIT:
                what = f"start of {what}"
        case Kernel() as kernel:
            what = kernel.name
        case Wait() | WaitEvent() | Synchronize() as wait:
            what = f"wait in {wait.where.rpartition(':')[2]}" if wait.where else "wait"
        case _:
            what = command.kind.value
    return f"{what} ({action})"
