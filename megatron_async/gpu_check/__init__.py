"""``megatron-async gpu-check``: does asynchronous training work on this machine's GPUs?"""
