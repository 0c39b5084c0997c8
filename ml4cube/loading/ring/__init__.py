"""Chunks go into slots, and slots into whole batches, by threads; no torch.

`ring` reads chunks into slots and copies samples into batches, `arrays` are what both are made of.
"""
