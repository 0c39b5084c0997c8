"""Scores, their intervals, and sentences about them, from sums."""
