"""A race that PyTorch's CUDA sanitizer has to find, so that its silence elsewhere says something.

The example of the sanitizer's own documentation: a tensor is made on one stream and changed on
another, which does not wait for the first. With ``TORCH_CUDA_SANITIZER=1`` it ends in an error.
"""

import torch

__all__ = ["main"]


def main() -> None:
    """Race."""
    tensor = torch.rand(4, 2, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.mul(tensor, 5, out=tensor)


if __name__ == "__main__":
    main()
