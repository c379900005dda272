"""Pretrain a GPT model with Megatron's flags, for those who have its wheel but no checkout.

    torchrun --nproc-per-node N -m megatron_async examples/pretrain_gpt.py FLAGS

The script itself is megatron_async/scripts/pretrain_gpt.py, so that an installed package has it
too. Copy that file to start a training script of your own.
"""

from megatron_async.scripts.pretrain_gpt import main

if __name__ == "__main__":
    main()
