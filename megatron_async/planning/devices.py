"""GPUs that can be planned for.

Peaks are those of NVIDIA's data sheets for the SXM parts: dense bf16, without sparsity. What
training reaches of the peak in its own computation is an estimate; give the share that your own
profile shows.

- A100: 44 % (1.7B) to 52 % (1T) of the peak in whole iterations, Narayanan et al., "Efficient
  Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473, table 1).
- H100: 41 % to 48 %, README of Megatron-LM, likewise in whole iterations.
- H200: no figure of its own; it computes as the H100 does.
- B200: no published figure that we checked. 40 % is a guess on the low side.

Since these are of whole iterations, bubbles and communication included, stages that compute alone
reach rather more; times that are too long favour no schedule, but memory-bound parts count less.
"""

from dataclasses import dataclass

__all__ = ["DEVICES", "Device"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU.

    Attributes:
        name: on the command line.
        memory_gib: that a process can allocate.
        peak_tflops: dense bf16, 10^12 operations a second.
        share: of the peak that training reaches.
        memory_gb_s: of its memory, 10^9 bytes a second.
        link_gb_s: of NVLink, in each direction, 10^9 bytes a second.
    """

    name: str
    memory_gib: float
    peak_tflops: float
    share: float
    memory_gb_s: float
    link_gb_s: float


DEVICES = {
    each.name: each
    for each in (
        Device(
            name="A100",  # with 80 GB
            memory_gib=79,
            peak_tflops=312,
            share=0.45,
            memory_gb_s=2039,
            link_gb_s=300,
        ),
        Device(
            name="H100",
            memory_gib=79,
            peak_tflops=989,
            share=0.45,
            memory_gb_s=3350,
            link_gb_s=450,
        ),
        Device(
            name="H200",
            memory_gib=139,
            peak_tflops=989,
            share=0.45,
            memory_gb_s=4800,
            link_gb_s=450,
        ),
        Device(
            name="B200",  # HGX: 180 GB of the 192 that are there
            memory_gib=178,
            peak_tflops=2250,
            share=0.40,
            memory_gb_s=7700,
            link_gb_s=900,
        ),
    )
}
"""By name."""
