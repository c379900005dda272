"""``megatron-async replay DIR``: what a recorded run would do on GPUs.

Reads the folder that a run wrote with ``--cpu --log-enqueues``, checks that accesses to one storage
are ordered, and runs all ranks on a model of the device with as many hardware queues as are given.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_async.replay.counts import host_waits, launches
from megatron_async.replay.device import DeviceDeadlock, run
from megatron_async.replay.nccl import MismatchError
from megatron_async.replay.races import find_races
from megatron_async.replay.steady import SteadyState, steady_state
from megatron_async.replay.trace import Trace, TraceError, read_all
from megatron_async.schedules.cost_flags import add_cost_flags, costs_of

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns 0, 1 after a fault, 2 if the folder cannot be read."""
    parser = _parser()
    args = parser.parse_args(argv)
    costs = costs_of(args)
    try:
        traces = read_all(args.directory)
    except (TraceError, OSError) as error:
        print(f"megatron-async replay: {error}", file=sys.stderr)
        return 2
    found = _print_races(traces, most=args.most)
    _print_rows(
        "the host waits for the device, times per iteration",
        [(each.stage, each.number, each.text) for each in host_waits(traces)],
        most=args.most,
    )
    _print_rows(
        "kernels launched per iteration",
        [(each.stage, each.number, each.text) for each in launches(traces)],
        most=args.most,
    )
    for connections in args.connections:
        try:
            device = run(
                traces,
                costs,
                connections=connections,
                run_ahead=args.run_ahead,
                launch=args.launch_us / 1e3,
            )
            state = steady_state(device)
        except DeviceDeadlock as deadlock:
            found = True
            print(f"\n{_connections(connections)}: DEADLOCK")
            for line in deadlock.lines:
                print(f"  {line}")
        except MismatchError as mismatch:
            found = True
            print(f"\n{_connections(connections)}: MISMATCH\n  {mismatch}")
        except ValueError as error:
            parser.error(str(error))
        else:
            _print_state(state, connections, most=args.most)
    return int(found)


def _print_races(traces: Sequence[Trace], *, most: int) -> bool:
    races = [race for trace in traces for race in find_races(trace)]
    if not races:
        print(f"no race on {len(traces)} ranks")
        return False
    print(f"{len(races)} RACES")
    for race in races[:most]:
        print(f"  {race}")
    if len(races) > most:
        print(f"  and {len(races) - most} more (--most)")
    return True


def _connections(number: int) -> str:
    return f"CUDA_DEVICE_MAX_CONNECTIONS={number}"


def _print_state(state: SteadyState, connections: int, *, most: int) -> None:
    print(
        f"\n{_connections(connections)}: {state.time:.4g} ms per iteration in the steady state, "
        f"{state.ratio:.3f} of the ideal {state.ideal:.4g}"
    )
    _print_rows(
        "computing streams stood still, ms per iteration",
        [(each.stage, each.time, each.text) for each in state.causes],
        most=most,
    )
    _print_rows(
        "NCCL kernels waited for peers and held SMs, ms per iteration",
        [(each.stage, each.time, each.text) for each in state.spins],
        most=most,
    )


def _print_rows(title: str, rows: Sequence[tuple[int, float, str]], *, most: int) -> None:
    if rows:
        print(f"  {title}:")
    for stage, number, text in rows[:most]:
        print(f"    stage {stage} {number:10.3f}  {text}")
    if len(rows) > most:
        print(f"    and {len(rows) - most} more (--most)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-async replay",
        description="Show faults of what a run would enqueue on GPUs, from the folder that it "
        "wrote on CPU ranks with --cpu --log-enqueues DIR: unordered accesses to memory, "
        "deadlocks, and what holds computation up with one hardware queue or with several. Nothing "
        "is trained. docs/replay.md says what is assumed.",
        allow_abbrev=False,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder of the run")
    parser.add_argument(
        "--connections",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="N",
        help="hardware queues, as CUDA_DEVICE_MAX_CONNECTIONS sets them (default: 1 8 32)",
    )
    add_cost_flags(parser, message="one message of NCCL or gloo")
    parser.add_argument(
        "--launch-us", type=float, default=0.0, help="host time to launch a kernel (default 0)"
    )
    parser.add_argument(
        "--run-ahead",
        type=int,
        default=1024,
        metavar="N",
        help="kernels that the host may be ahead of the device (default 1024)",
    )
    parser.add_argument(
        "--most", type=int, default=8, metavar="N", help="lines of each list (default 8)"
    )
    return parser
