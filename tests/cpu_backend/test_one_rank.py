"""Collectives of one rank give what gloo gives, without its worker."""

from tests.support.torchrun import run_python


def test_collectives_of_one_rank_are_those_of_gloo() -> None:
    result = run_python(
        """
        import json, os
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
        from megatron_async import cpu_backend
        cpu_backend.install()
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d as c10d
        from megatron_async.cpu_backend.one_rank import Done

        dist.init_process_group("nccl")
        group = dist.new_group([0])
        torch.manual_seed(0)
        equal, at_once = {}, {}

        def compare(name, call):
            # Of the replaced function and of gloo's own.
            outputs, works = [], []
            for module in (dist, c10d):
                for asynchronous in (False, True):
                    a, b = torch.arange(6.0) / 7, torch.full((6,), -1.0)
                    work = call(getattr(module, name), a, b, asynchronous)
                    if asynchronous:
                        work.wait()
                        works.append(isinstance(work, Done))
                    else:
                        assert work is None
                    outputs.append([*a.tolist(), *b.tolist()])
            equal[name] = all(one == outputs[0] for one in outputs)
            at_once[name] = works

        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            compare("all_reduce", lambda f, a, b, w: f(a, op=operation, group=group, async_op=w))
        compare("all_reduce", lambda f, a, b, w: f(a, async_op=w))
        compare("reduce", lambda f, a, b, w: f(a, 0, dist.ReduceOp.SUM, group, w))
        compare("broadcast", lambda f, a, b, w: f(a, 0, group, w))
        compare("barrier", lambda f, a, b, w: f(group, w))
        compare("all_gather_into_tensor", lambda f, a, b, w: f(b, a, group=group, async_op=w))
        compare("all_gather", lambda f, a, b, w: f([b], a, group=group, async_op=w))
        compare("reduce_scatter_tensor", lambda f, a, b, w: f(b, a, group=group, async_op=w))

        # As Megatron's data parallelism has them, in place and not.
        flat = torch.arange(6.0)
        with dist._coalescing_manager(group, async_ops=True) as works:
            dist.reduce_scatter_tensor(flat, flat, group=group, async_op=True)
            dist.all_reduce(flat, group=group)
        works.wait()
        # Of what torch coalesces by itself, nothing is left out.
        other = torch.arange(6.0)
        with c10d._coalescing_manager(group, async_ops=True) as coalesced:
            dist.all_reduce(other, group=group)
        coalesced.wait()
        print(json.dumps({
            "equal": equal,
            "at once": at_once,
            "in place": flat.tolist() == other.tolist() == list(range(6)),
        }))
        """
    )
    names = {
        *("all_reduce", "reduce", "broadcast", "barrier"),
        *("all_gather", "all_gather_into_tensor", "reduce_scatter_tensor"),
    }
    assert result == {
        "equal": dict.fromkeys(names, True),
        "at once": {name: [True, False] for name in names},
        "in place": True,
    }
