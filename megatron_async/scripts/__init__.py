"""Training scripts for people who have Megatron's wheel but no checkout of Megatron-LM."""
