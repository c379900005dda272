"""The CPU backend: its flags, what it replaces, and the harness that starts jobs on it."""

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from megatron_async.cpu_backend import cpu_argv
from tests.support.gpt import gpt_args
from tests.support.torchrun import run_python, run_torchrun, stop

# ------------------------------------------------------------------------------- the command line

ALWAYS = (
    "--transformer-impl local --distributed-backend gloo --attention-backend unfused "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--disable-jit-fuser"
)


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ("", ALWAYS),
        ("--lr 1e-3 --betas 0.9 -1", ALWAYS),
        ("--transformer-impl local", ALWAYS.replace("--transformer-impl local ", "")),
        ("--distributed-backend=gloo", ALWAYS.replace("--distributed-backend gloo ", "")),
        ("--attention-backend auto", ALWAYS.replace("--attention-backend unfused ", "")),
        ("--no-persist-layer-norm", ALWAYS.replace("--no-persist-layer-norm ", "")),
        ("--position-embedding-type rope", f"{ALWAYS} --no-rope-fusion"),
        ("--position-embedding-type=yarn", f"{ALWAYS} --no-rope-fusion"),
        ("--use-rotary-position-embeddings", f"{ALWAYS} --no-rope-fusion"),
        ("--use-rotary-position-embeddings --no-rope-fusion", ALWAYS),
        ("--position-embedding-type learned_absolute", ALWAYS),
        ("--async-save", f"{ALWAYS} --async-strategy mcore"),
        (ALWAYS, ""),
    ],
)
def test_adds_the_flags_that_were_not_given(given: str, added: str) -> None:
    argv = given.split()
    assert cpu_argv(argv) == (argv + added.split(), added.split())
    assert argv == given.split(), "the argument must stay as it is"


@pytest.mark.parametrize(
    "given",
    [
        "--transformer-impl transformer_engine",
        "--transformer-impl=transformer_engine",
        "--transformer-impl inference_optimized",
        "--distributed-backend nccl",
        "--attention-backend flash",
        "--attention-backend local",
        "--context-parallel-size 2",
        "--multi-latent-attention",
        "--fp8-format hybrid",
        "--fp4-format e2m1",
        "--use-flash-attn",
        "--use-precision-aware-optimizer",
        "--optimizer-cpu-offload",
        "--tp-comm-overlap",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type flex",
        "--cuda-graph-impl local",
        "--enable-cuda-graph",
        "--use-megatron-fsdp",
        "--use-torch-fsdp2",
        "--async-strategy nvrx",
        "--profile",
        "--log-energy",
        "--yaml-cfg x.yaml",
    ],
)
def test_refuses_what_cannot_work_and_names_it(given: str) -> None:
    with pytest.raises(ValueError, match="does not work on CPU ranks") as error:
        cpu_argv(["--lr", "1e-3", *given.split()])
    assert str(error.value).startswith(given.replace("=", " "))


@pytest.mark.parametrize(
    "given",
    [
        "--context-parallel-size 1",
        "--context-parallel-size 2 --context-parallel-size 1",
        "--moe-token-dispatcher-type alltoall",
        "--cuda-graph-impl none",
        "--profile --use-pytorch-profiler",
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native",
    ],
)
def test_allows_the_harmless_values_of_the_same_flags(given: str) -> None:
    argv, _ = cpu_argv(given.split())
    assert argv[: len(given.split())] == given.split()


def test_names_all_conflicts_at_once() -> None:
    with pytest.raises(ValueError, match="fp8-format") as error:
        cpu_argv(["--fp8-format", "hybrid", "--context-parallel-size", "2"])
    assert "--context-parallel-size 2" in str(error.value)


# ----------------------------------------------------------------------------------- installation


def test_importing_replaces_nothing() -> None:
    result = run_python(
        """
        import json, os, sys
        environment = dict(os.environ)
        from megatron_async import cpu_backend
        loaded = [name for name in ("torch", "megatron.core") if name in sys.modules]

        import torch, torch.utils.data
        from megatron_async.megatron.replaced import resolve
        holders = (torch, torch.Tensor, torch.cuda, torch.distributed, torch.optim.Optimizer)
        before = [dict(vars(holder)) for holder in holders]
        rows = [row for row in cpu_backend.replacements() if row.target.startswith("torch")]
        print(json.dumps({
            "loaded": loaded,
            "installed": cpu_backend.installed(),
            "environment": environment == dict(os.environ),
            "same": [
                all(vars(holder)[name] is value for name, value in attributes.items())
                for holder, attributes in zip(holders, before)
            ],
            "rows": len(rows),
            "why": [row.name for row in cpu_backend.replacements() if not row.why],
        }))
        """
    )
    assert result.pop("rows") > 50
    assert result == {
        "loaded": [],
        "installed": False,
        "environment": True,
        "same": [True] * 5,
        "why": [],
    }


def test_install_replaces_exactly_what_the_table_says(tmp_path: Path) -> None:
    # A package that cannot be imported without a GPU, as Megatron's users may have it.
    (tmp_path / "transformer_engine.py").write_text("raise OSError('libcuda.so.1 is missing')\n")
    result = run_python(
        """
        import inspect, json, os, sys
        import torch, torch.utils.data, torch.cuda.nvtx
        from megatron_async import cpu_backend
        from megatron_async.megatron.replaced import resolve

        def attributes():
            # Of all modules of torch that are loaded, and of the classes in them.
            modules = [m for n, m in sys.modules.items() if n.partition(".")[0] == "torch" and m]
            classes = [
                value for module in modules for value in vars(module).values()
                if inspect.isclass(value) and value.__module__.startswith("torch")
            ]
            return {
                (id(holder), name): (getattr(holder, "__name__", "?"), value)
                for holder in modules + classes for name, value in list(vars(holder).items())
            }

        before = attributes()
        applied = cpu_backend.install()
        again = cpu_backend.install()
        after = attributes()
        rows = [row for row in applied if row.target.startswith("torch")]
        table = {(id(resolve(row.target)), row.attribute): row.name for row in rows}
        holders = {id(resolve(row.target)) for row in rows if ":" in row.target}
        changed = {
            key: f"{holder}.{key[1]}" for key, (holder, value) in after.items()
            # Counters and caches change by themselves, and one function by Megatron's own doing.
            if (key in table or callable(value))
            and not str(getattr(value, "__module__", "")).startswith("megatron.")
            # A method that was inherited before is new in its class.
            and (before[key][1] is not value if key in before else key[0] in holders)
        }
        try:
            import transformer_engine
            hidden = False
        except ImportError:
            hidden = True
        everything = cpu_backend.replacements()
        print(json.dumps({
            "not in the table": [name for key, name in changed.items() if key not in table],
            "not replaced": [name for key, name in table.items() if key not in changed],
            "neither applied nor absent": [
                row.name for row in everything
                if row.name not in [other.name for other in applied]
                and hasattr(resolve(row.target), row.attribute)
            ],
            "twice in the table": len(everything) - len({row.name for row in everything}),
            "idempotent": again == applied and cpu_backend.installed(),
            "GPU package hidden": hidden,
            "GPUs": os.environ["CUDA_VISIBLE_DEVICES"],
            "torch._dynamo": "torch._dynamo" in sys.modules,
        }))
        """,
        path=tmp_path,
    )
    assert result == {
        "not in the table": [],
        "not replaced": [],
        "neither applied nor absent": [],
        "twice in the table": 0,
        "idempotent": True,
        "GPU package hidden": True,
        "GPUs": "",
        "torch._dynamo": False,
    }


def test_the_rows_of_megatron_replace_nothing_else() -> None:
    result = run_python(
        """
        import json, sys
        from megatron_async.cpu_backend.megatron_rows import megatron_rows
        from megatron_async.megatron.replaced import apply, resolve
        from megatron.core.package_info import __version__

        rows = megatron_rows()
        [resolve(row.target) for row in rows]
        holders = {m.__name__: m for n, m in sys.modules.items() if n.startswith("megatron.") and m}
        holders |= {row.target: resolve(row.target) for row in rows}
        before = {name: dict(vars(holder)) for name, holder in holders.items()}
        apply(rows, __version__)
        changed = [
            [name, key] for name, holder in holders.items() for key, value in vars(holder).items()
            if key not in before[name] or before[name][key] is not value
        ]
        print(json.dumps({
            "changed": sorted(changed),
            "rows": sorted([row.target, row.attribute] for row in rows),
        }))
        """
    )
    assert result["changed"] == result["rows"]
    assert len(result["rows"]) >= 9


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("sys.modules['megatron.core'] = types.ModuleType('megatron.core')", "megatron.core was"),
        ("import torch; torch.cuda.is_initialized = lambda: True", "has used a GPU"),
        (
            "import megatron_async.cpu_backend.megatron_rows as m; m.MEGATRON_VERSIONS = '<0.17'",
            "does not know megatron-core 0.",
        ),
    ],
)
def test_install_refuses_and_says_why(before: str, message: str) -> None:
    error = run_python(
        f"""
        import json, sys, types
        {before}
        from megatron_async import cpu_backend
        try:
            cpu_backend.install()
        except RuntimeError as error:
            print(json.dumps([str(error), cpu_backend.installed()]))
        """
    )
    assert message in error[0]
    assert error[1] is False


def test_a_version_without_an_attribute_is_refused_and_left_alone() -> None:
    from megatron_async.megatron.replaced import Replacement, apply

    def row(attribute: str, versions: str = ">=2", optional: bool = False) -> Replacement:
        return Replacement(
            target="json",
            attribute=attribute,
            make=lambda original: original,
            why="test",
            versions=versions,
            optional=optional,
        )

    with pytest.raises(RuntimeError, match=r"json\.gone.*>=2"):
        apply([row("dumps"), row("gone")], "2.5")
    chosen = [row("dumps"), row("gone", optional=True), row("loads", versions="<2")]
    assert apply(chosen, "2.5+cu130") == (chosen[0],)


# -------------------------------------------------------------------------------- on one process


def test_torch_behaves_as_megatron_expects_of_a_gpu() -> None:
    result = run_python(
        """
        import json
        from megatron_async import cpu_backend
        cpu_backend.install()
        import torch

        device = torch.cuda.current_device()
        tensors = [
            torch.zeros(2, device=device), torch.zeros(2, device="cuda"),
            torch.zeros(2, device=torch.device("cuda:0")), torch.ones(2).to(device),
            torch.ones(2).to(device="cuda"), torch.ones(2).new_zeros(2, device=device),
            torch.ones(2).cuda(), torch.nn.Linear(2, 2).cuda().weight,
            torch.ones(2).pin_memory(),
        ]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        end.record()
        torch.cuda.synchronize()

        # Dropout draws from what torch.cuda's random state describes.
        torch.cuda.manual_seed(3)
        state = torch.cuda.get_rng_state()
        first = torch.rand(4)
        loader = torch.utils.data.DataLoader(range(8), batch_size=2, shuffle=False)
        torch.cuda.set_rng_state(state)
        batches = [batch.tolist() for batch in loader]
        second = torch.rand(4)
        torch.cuda.default_generators[0].manual_seed(3)
        third = torch.rand(4)

        @torch.compile
        def plain(x): return x + 1
        @torch.compile(fullgraph=True)
        def with_options(x): return x + 1

        print(json.dumps({
            "on the host": all(tensor.device.type == "cpu" for tensor in tensors),
            "meta stays": str(torch.empty(2, device="meta").device),
            "types": [t.type() for t in (torch.ones(1), torch.ones(1).bfloat16())],
            "converts": str(torch.ones(1).type(torch.float64).dtype),
            "event order": 0 <= start.elapsed_time(end),
            "random": first.tolist() == second.tolist() == third.tolist(),
            "batches": len(batches),
            "memory": 0 < torch.cuda.memory_allocated() <= torch.cuda.get_device_properties(0)
                .total_memory and torch.cuda.max_memory_allocated() > 0,
            "memory statistics": [
                torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0,
                torch.cuda.memory_stats()["allocation.all.current"],
            ],
            "compiled": [plain(1), with_options(1)],
        }))
        """
    )
    assert result == {
        "on the host": True,
        "meta stays": "meta",
        "types": ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"],
        "converts": "torch.float64",
        "event order": True,
        "random": True,
        "batches": 4,
        "memory": True,
        "memory statistics": [True, 0],
        "compiled": [2, 2],
    }


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_is_torchs_adam_with_the_counter_in_its_group(decoupled: bool) -> None:
    import torch

    from megatron_async.cpu_backend.megatron_rows import FusedAdam

    torch.manual_seed(0)
    start = torch.randn(5, 3)
    ours, reference = (torch.nn.Parameter(start.clone()) for _ in range(2))
    unused = torch.nn.Parameter(torch.ones(2))
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    fused = FusedAdam([ours, unused], adam_w_mode=decoupled, **options)
    adam = (torch.optim.AdamW if decoupled else torch.optim.Adam)([reference], **options)
    for step in range(1, 6):
        gradient = torch.randn(5, 3)
        ours.grad, reference.grad = gradient.clone(), gradient.clone()
        fused.step()
        adam.step()
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)
        assert fused.param_groups[0]["step"] == step
        if step == 3:  # goes on after saving and loading
            state = fused.state_dict()
            fused = FusedAdam([ours, unused], adam_w_mode=decoupled, **options)
            fused.load_state_dict(state)
    assert set(fused.state[ours]) == {"exp_avg", "exp_avg_sq"}
    assert unused not in fused.state
    with pytest.raises(ValueError, match="optimizer-cuda-graph"):
        FusedAdam([ours], capturable=True)


def test_an_asynchronous_save_gets_copies() -> None:
    import torch

    from megatron_async.cpu_backend.megatron_rows import megatron_rows

    class Request(NamedTuple):
        async_fn_args: tuple[Any, ...]
        preload_fn: Any = None

    (row,) = (row for row in megatron_rows() if row.attribute == "schedule_async_call")
    scheduled: list[Request] = []
    schedule = row.make(lambda self, request: scheduled.append(request))
    weight = torch.ones(2)
    buckets = [("file", "key", ([("item", b"bytes")], [("item", weight)]))]
    schedule(None, Request((0, buckets, "queue"), preload_fn=lambda: buckets))
    weight.zero_()
    ((rank, [(*names, (others, [(item, saved)]))], queue),) = (r.async_fn_args for r in scheduled)
    assert saved.tolist() == [1, 1]
    assert (rank, names, others) == (0, ["file", "key"], [("item", b"bytes")])
    assert (item, queue, scheduled[0].preload_fn) == ("item", "queue", None)
    nothing = Request(())
    schedule(None, nothing)
    assert scheduled[1] is nothing


# ------------------------------------------------------------------------------- on several ranks

COLLECTIVES = """
import os
import torch
from megatron_async import cpu_backend
cpu_backend.install()
import torch.distributed as dist
from torch.distributed import _coalescing_manager

dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
rank = dist.get_rank()
assert dist.get_backend() == "gloo"
group = dist.new_group([0, 1], backend="nccl")
assert dist.get_backend(group) == "gloo"

def check(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=tensor.dtype), rtol=0, atol=0)

for dtype in (torch.float32, torch.bfloat16):
    ones = torch.ones(4, dtype=dtype, device="cuda")

    # Unequal sizes, with the own part in place, out of place, and an empty one.
    for asynchronous in (False, True):
        flat = torch.zeros(5, dtype=dtype)
        outputs = [flat[:2], flat[2:]]
        own = outputs[rank].fill_(rank + 1)
        work = dist.all_gather(outputs, own, group=group, async_op=asynchronous)
        if asynchronous:
            work.wait()
            assert work.is_completed()
        else:
            assert work is None
        check(flat, [1, 1, 2, 2, 2])
        outputs = [torch.zeros(3, dtype=dtype), torch.zeros(0, dtype=dtype)]
        dist.all_gather(outputs, torch.full((3 - 3 * rank,), 7, dtype=dtype))
        check(outputs[0], [7, 7, 7])
    outputs = [torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype)]
    dist.all_gather(outputs, ones[:2] * rank, async_op=True).wait()
    check(torch.cat(outputs), [0, 0, 1, 1])

    # Split sizes as tensors: rank 0 keeps one and sends one, rank 1 sends two.
    output = torch.zeros([3, 1][rank], dtype=dtype)
    sent, received = ([1, 1], [1, 2]) if rank == 0 else ([2, 0], [1, 0])
    dist.all_to_all_single(
        output, ones[:2] * (rank + 1), torch.tensor(received), torch.tensor(sent), group=group
    )
    check(output, [1, 2, 2] if rank == 0 else [1])

    # What Megatron's data parallelism does, several buckets at a time and asynchronously.
    buckets = [ones.clone(), torch.full((6,), 2.0, dtype=dtype) + rank]
    shards = [bucket.chunk(2)[rank] for bucket in buckets]
    for operation, expected in ((dist.ReduceOp.SUM, [2, 5]), (dist.ReduceOp.AVG, [2, 5])):
        with _coalescing_manager(group, async_ops=True) as works:
            for shard, bucket in zip(shards, buckets):
                dist.reduce_scatter_tensor(shard, bucket, op=operation, group=group, async_op=True)
        works.wait()
        check(shards[0][:1], expected[:1])
        check(shards[1][:1], expected[1:])
        with _coalescing_manager(group, async_ops=True) as works:
            for shard, bucket in zip(shards, buckets):
                dist.all_gather_into_tensor(bucket, shard, group=group, async_op=True)
        works.wait()
        check(buckets[0], [2] * 4)
        check(buckets[1], [5] * 6)

    for operation in (dist.all_reduce, lambda t, **k: dist.reduce(t, dst=0, **k)):
        total = ones * (rank + 1)
        operation(total, group=group, async_op=True).wait()
        if rank == 0 or operation is dist.all_reduce:
            check(total, [3] * 4)
    sent = ones * rank
    dist.broadcast(sent, src=1, group=group, async_op=True).wait()
    check(sent, [1] * 4)

# Two workers of one group corrupt the heap.
for each in (dist.group.WORLD, group):
    backend = each._get_backend(torch.device("cpu"))
    assert backend.options._threads == 1
    assert isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
for _ in range(int(os.environ.get("ROUNDS", 1))):
    pending = []
    for _ in range(16):
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as works:
            dist.all_gather_into_tensor(torch.empty(128), torch.ones(64), async_op=True)
        pending.append(works)
    for works in pending:
        works.wait()
dist.barrier(device_ids=[torch.cuda.current_device()])
print("collectives agree")
"""


# Without the replacement of torch's ProcessGroupGloo, a hundred to some thousand rounds crash.
@pytest.mark.parametrize("rounds", [10, pytest.param(10000, marks=pytest.mark.slow)])
def test_collectives_of_nccl_work_under_gloo(tmp_path: Path, rounds: int) -> None:
    script = tmp_path / "collectives.py"
    script.write_text(COLLECTIVES)
    result = run_torchrun(2, [], launcher="none", script=script, env={"ROUNDS": str(rounds)})
    assert all("collectives agree" in rank.stdout for rank in result.ranks)


# ------------------------------------------------------------------------------------ the harness


def test_stopping_a_job_ends_processes_in_sessions_of_their_own() -> None:
    # As torchrun starts its ranks.
    code = (
        "import subprocess, sys, time; "
        "rank = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)']; "
        "child = subprocess.Popen(rank, start_new_session=True, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    stop(process)
    assert process.poll() is not None
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_job_that_fails_fails_the_test_and_shows_each_ranks_log(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text("import os\nprint('I am', os.environ['RANK'])\nraise SystemExit('no luck')\n")
    with pytest.raises(pytest.fail.Exception) as failure:
        run_torchrun(2, [], launcher="none", script=script)
    message = str(failure.value)
    assert "I am 0" in message or "I am 1" in message
    assert "no luck" in message


def test_command_lines() -> None:
    argv = gpt_args(lr=None, bf16=True, mock_data=False, data_path=["a", "b"], num_layers=2)
    line = " ".join(argv)
    assert "--lr 1e-3" not in line
    assert "--mock-data" not in argv
    assert "--bf16" in argv
    assert "--data-path a b" in line
    assert "--num-layers 2" in line
