"""The delay study: a grid of training runs, how it is run, and what it shows."""
