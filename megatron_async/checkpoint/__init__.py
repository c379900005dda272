"""What an asynchronous run adds to Megatron's checkpoints, and how it is resumed from them."""
