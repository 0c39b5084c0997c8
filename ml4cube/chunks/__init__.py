"""Chunks of stored cubes: which lie behind an opened variable, and how they are decoded."""
