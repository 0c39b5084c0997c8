"""Chunks go into slots, and slots into whole batches, by threads; no torch.

`ring` reads chunks into slots, `gathering` runs the threads that copy samples into batches,
`arrays` are what both are made of.
"""
