"""The command-line flags that a run on CPU ranks needs, or cannot have."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["cpu_argv"]

type _Given = Mapping[str, tuple[str, ...]]


def _one_of(*values: str) -> Callable[[tuple[str, ...]], bool]:
    return lambda given: bool(given) and given[-1] in values


def _none_of(*values: str) -> Callable[[tuple[str, ...]], bool]:
    return lambda given: not given or given[-1] not in values


def _never(given: tuple[str, ...]) -> bool:
    return False


def _uses_rotary(given: _Given) -> bool:
    return "--use-rotary-position-embeddings" in given or given.get(
        "--position-embedding-type", ("",)
    )[-1:] in (("rope",), ("yarn",), ("mrope",))


@dataclass(frozen=True, slots=True)
class _Default:
    """A flag that is added unless it was given."""

    flag: str
    value: str | None = None
    needed: Callable[[_Given], bool] = lambda _given: True

    @property
    def tokens(self) -> list[str]:
        return [self.flag] if self.value is None else [self.flag, self.value]


@dataclass(frozen=True, slots=True)
class _Conflict:
    """A flag that cannot be had, unless ``allowed`` says otherwise of its values, or there is the
    flag ``unless``."""

    flag: str
    why: str
    instead: str
    allowed: Callable[[tuple[str, ...]], bool] = _never
    unless: str = ""


_DEFAULTS = (
    _Default("--transformer-impl", "local"),
    _Default("--distributed-backend", "gloo"),
    _Default("--attention-backend", "unfused"),
    _Default("--no-persist-layer-norm"),
    _Default("--no-gradient-accumulation-fusion"),
    _Default("--no-masked-softmax-fusion"),
    _Default("--disable-jit-fuser"),
    _Default("--no-rope-fusion", needed=_uses_rotary),
    # Megatron's fused operator has no scale for each token, as an expert has.
    _Default(
        "--no-bias-gelu-fusion",
        needed=lambda given: "--num-experts" in given and "--swiglu" not in given,
    ),
    _Default("--async-strategy", "mcore", needed=lambda given: "--async-save" in given),
)

_TE = "it needs Transformer Engine, which runs on GPUs only"
_GRAPHS = "CUDA graphs need a GPU"
_KERNELS = "its kernels run on GPUs only"
_OFFLOAD = "the weights and activations are in host memory already"

_CONFLICTS = (
    _Conflict("--transformer-impl", _TE, "use `local`", _one_of("local")),
    _Conflict("--distributed-backend", "NCCL needs GPUs", "use `gloo`", _one_of("gloo")),
    _Conflict("--attention-backend", _TE, "use `unfused`", _one_of("unfused", "auto")),
    _Conflict(
        "--async-strategy",
        "nvidia-resiliency-ext starts processes that need GPUs",
        "use `mcore`",
        _one_of("mcore"),
    ),
    _Conflict("--hierarchical-context-parallel-sizes", _TE, "drop it"),
    _Conflict("--hybrid-context-parallel", _TE, "drop it"),
    *(
        _Conflict(
            flag,
            "Mamba layers (M) need mamba-ssm, whose kernels run on GPUs only",
            "use attention (*), MLP (-) and MoE (E) layers",
            lambda given: not given or "M" not in given[-1],
        )
        for flag in ("--hybrid-layer-pattern", "--hybrid-override-pattern")
    ),
    _Conflict("--fp8-format", _TE, "use --bf16"),
    _Conflict("--fp8-param-gather", _TE, "use --bf16"),
    _Conflict("--fp4-format", _TE, "use --bf16"),
    _Conflict("--fp4-param-gather", _TE, "use --bf16"),
    _Conflict("--use-flash-attn", _KERNELS, "drop it"),
    _Conflict("--flash-decode", _KERNELS, "drop it"),
    _Conflict("--exp-avg-dtype", _TE, "use `bf16`", _none_of("fp8")),
    _Conflict("--exp-avg-sq-dtype", _TE, "use `bf16`", _none_of("fp8")),
    _Conflict("--use-transformer-engine-op-fuser", _TE, "drop it"),
    _Conflict("--te-precision-config-file", _TE, "drop it"),
    _Conflict("--tp-comm-overlap", _TE, "drop it"),
    _Conflict("--cross-entropy-fusion-impl", _TE, "use `native`", _one_of("native")),
    _Conflict(
        "--num-experts",
        "Megatron's local linear layers cannot add an expert's bias (an in-place operation in "
        "megatron/core/transformer/mlp.py)",
        "add --disable-bias-linear",
        unless="--disable-bias-linear",
    ),
    _Conflict("--moe-grouped-gemm", _KERNELS, "drop it"),
    _Conflict("--moe-permute-fusion", _TE, "drop it"),
    _Conflict("--moe-router-fusion", _TE, "drop it"),
    _Conflict("--moe-enable-deepep", _KERNELS, "drop it"),
    _Conflict("--moe-token-dispatcher-type", _KERNELS, "use `alltoall`", _none_of("flex")),
    _Conflict("--cuda-graph-impl", _GRAPHS, "drop it", _one_of("none")),
    _Conflict("--enable-cuda-graph", _GRAPHS, "drop it"),
    _Conflict("--external-cuda-graph", _GRAPHS, "drop it"),
    _Conflict("--optimizer-cuda-graph", _GRAPHS, "drop it"),
    _Conflict("--optimizer-cpu-offload", _OFFLOAD, "drop it"),
    _Conflict("--cpu-offloading-num-layers", _OFFLOAD, "drop it", _one_of("0")),
    _Conflict("--fine-grained-activation-offloading", _OFFLOAD, "drop it"),
    _Conflict("--use-megatron-fsdp", "Megatron-FSDP works on GPU memory", "drop it"),
    _Conflict("--use-torch-fsdp2", "torch FSDP2 works on GPU memory here", "drop it"),
    _Conflict("--use-nccl-ub", "NCCL needs GPUs", "drop it"),
    _Conflict("--nccl-communicator-config-path", "NCCL needs GPUs", "drop it"),
    _Conflict("--pipeline-model-parallel-comm-backend", "NCCL and UCC need GPUs", "drop it"),
    _Conflict(
        "--profile",
        "it starts a GPU profiler",
        "add --use-pytorch-profiler",
        unless="--use-pytorch-profiler",
    ),
    _Conflict("--log-straggler", "it reads GPU clocks and temperatures", "drop it"),
    _Conflict("--log-energy", "it reads GPU power", "drop it"),
    _Conflict("--record-memory-history", "it records GPU memory", "drop it"),
    _Conflict("--yaml-cfg", "it takes the place of all flags, these too", "give flags instead"),
)


def _parse(argv: Sequence[str]) -> _Given:
    """Map each flag of ``argv`` to its values: all tokens up to the next flag, or after ``=``."""
    given: dict[str, tuple[str, ...]] = {}
    flag = ""
    for token in argv:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            given[flag] = (value,) if equals else ()
        elif flag:
            given[flag] += (token,)
    return MappingProxyType(given)


def cpu_argv(argv: list[str]) -> tuple[list[str], list[str]]:
    """Add the flags that Megatron needs on CPU ranks and that ``argv`` does not give.

    Args:
        argv: a script's arguments, without the script.

    Returns:
        The new arguments (``argv`` is left as it is), and the flags that were added, with their
        values.

    Raises:
        ValueError: ``argv`` has flags that cannot work on CPU ranks; the message names each, why,
            and what to give instead.
    """
    given = _parse(argv)
    errors = []
    for conflict in _CONFLICTS:
        if conflict.flag not in given or conflict.allowed(given[conflict.flag]):
            continue
        if conflict.unless in given:
            continue
        flag = " ".join([conflict.flag, *given[conflict.flag]])
        fix = conflict.instead[0].upper() + conflict.instead[1:]
        errors.append(f"{flag} does not work on CPU ranks (--cpu): {conflict.why}. {fix}.")
    if errors:
        raise ValueError("\n".join(errors))
    added = [
        token
        for default in _DEFAULTS
        if default.flag not in given and default.needed(given)
        for token in default.tokens
    ]
    return [*argv, *added], added
