"""What the check trains: sizes of a GPT, and the flags that set its runs apart."""

from dataclasses import dataclass, replace

from megatron_async.corrections import RECOMMENDED as CORRECTION
from megatron_async.schedules.pipedream_2bw import PIPEDREAM_2BW

__all__ = [
    "ASYNCHRONOUS",
    "LARGE",
    "LOCAL",
    "PIPELINE",
    "SCHEDULE",
    "SMALL",
    "TRANSFORMER_ENGINE",
    "Model",
]

SCHEDULE = PIPEDREAM_2BW.name
"""All microbatches of a batch are delayed, so that nothing asynchronous is left out."""

ASYNCHRONOUS = ("--pipeline-schedule", SCHEDULE, "--delay-correction", CORRECTION)

LOCAL = (
    *("--transformer-impl", "local"),
    *("--attention-backend", "unfused"),
    "--no-gradient-accumulation-fusion",
)
"""Layers in PyTorch alone. Fused accumulation needs a kernel of Apex."""

TRANSFORMER_ENGINE = ("--transformer-impl", "transformer_engine")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The size of a GPT and of its runs.

    Attributes:
        layers: divisible by 4, the largest number of stages.
        hidden_size: its width.
        heads: attention heads of a layer.
        sequence: its length in tokens.
        vocabulary: a multiple of 128, so that Megatron does not pad it.
        micro_batch: sequences.
        iterations: optimizer steps of a run.
        learning_rate: of Adam, constant.
        portable: initial weights are the same on every device. They are drawn on the host, which
            takes long for large models.
    """

    layers: int
    hidden_size: int
    heads: int
    sequence: int
    vocabulary: int
    micro_batch: int
    iterations: int
    learning_rate: float
    portable: bool = False

    @property
    def shape(self) -> dict[str, object]:
        """Flags that Megatron and ``megatron-async plan`` share, without their dashes."""
        return {
            "num-layers": self.layers,
            "hidden-size": self.hidden_size,
            "num-attention-heads": self.heads,
            "seq-length": self.sequence,
            "vocab-size": self.vocabulary,
            "micro-batch-size": self.micro_batch,
            "optimizer": "adam",
        }

    def flags(self, *, stages: int, microbatches: int) -> list[str]:
        """Megatron's flags.

        Args:
            stages: pipeline stages, each on a rank of its own.
            microbatches: of a batch.
        """
        flags = self.shape | {
            "pipeline-model-parallel-size": stages,
            "max-position-embeddings": self.sequence,
            "global-batch-size": microbatches * self.micro_batch,
            "train-iters": self.iterations,
            "lr": self.learning_rate,
            "min-lr": self.learning_rate,
            "lr-decay-style": "constant",
            "clip-grad": 1.0,
            # Dropout's random numbers differ between devices.
            "hidden-dropout": 0,
            "attention-dropout": 0,
            "tokenizer-type": "NullTokenizer",
            "log-interval": 1,
            "log-memory-interval": 4,
            "eval-interval": 1000,
            "eval-iters": 0,
            "num-workers": 0,
            "seed": 1234,
        }
        switches = [
            "--bf16",
            "--mock-data",
            # Kernels of Apex, and torch.compile: the sanitizer does not see into them.
            "--no-persist-layer-norm",
            "--no-masked-softmax-fusion",
            "--disable-jit-fuser",
        ]
        if self.portable:
            switches.append("--use-cpu-initialization")
        pairs = (part for name, value in flags.items() for part in (f"--{name}", str(value)))
        return [*pairs, *switches]


SMALL = Model(
    layers=4,
    hidden_size=128,
    heads=4,
    sequence=64,
    vocabulary=256,
    micro_batch=2,
    iterations=14,
    learning_rate=1e-3,
    portable=True,
)
"""CPU ranks train it in seconds. On made-up data its loss falls fast enough to tell a delay."""

LARGE = Model(
    layers=24,
    hidden_size=1024,
    heads=16,
    sequence=1024,
    vocabulary=50304,
    micro_batch=4,
    iterations=14,
    learning_rate=1e-4,
)
"""GPT-3's 350M, on sequences of half the length."""

PIPELINE = replace(LARGE, vocabulary=1024)
"""Its layers with few tokens: an output layer of 50,000 takes the last stage four layers' time."""
