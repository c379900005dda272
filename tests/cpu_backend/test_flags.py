"""The flags that CPU ranks need, and those that do not work there."""

import pytest

from megatron_async.cpu_backend import cpu_argv

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
        ("--num-experts 4 --swiglu --disable-bias-linear", ALWAYS),
        ("--num-experts 4 --disable-bias-linear", f"{ALWAYS} --no-bias-gelu-fusion"),
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
        "--hybrid-context-parallel",
        "--hybrid-layer-pattern M*|M-",
        "--fp8-format hybrid",
        "--fp4-format e2m1",
        "--use-flash-attn",
        "--exp-avg-dtype fp8",
        "--optimizer-cpu-offload",
        "--tp-comm-overlap",
        "--num-experts 4",
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
        "--multi-latent-attention",
        "--context-parallel-size 2",
        "--distributed-backend nccl --distributed-backend gloo",
        "--use-precision-aware-optimizer --exp-avg-dtype fp16",
        "--hybrid-layer-pattern *-|*E",
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
        cpu_argv(["--fp8-format", "hybrid", "--attention-backend", "flash"])
    assert "--attention-backend flash" in str(error.value)
