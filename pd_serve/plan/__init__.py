"""Answers before anything is bought: what KV costs to move, how many workers of each kind, what a load would do to them.

Called by `pd-serve plan`; serves nothing. Pure arithmetic and a simulator on a virtual clock: no torch, no I/O but the files and the
`/metrics` that a command names.
"""
