"""Chunks go into slots, and slots into whole batches, by threads; no torch.

`ring` runs the threads, `slots` hold chunks, `gathering` copies samples into batches.
"""
