"""What the benchmarks share: starting jobs, taking times inside of them, and reporting."""
