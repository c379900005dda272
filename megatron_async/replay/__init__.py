"""Replay: show, without a GPU, faults of what the host would enqueue on one.

CPU ranks record what they would enqueue (:mod:`.record`); :mod:`.races` checks that accesses to
one storage are ordered, and :mod:`.device` runs all ranks' traces on a model of the device. See
docs/replay.md.
"""
