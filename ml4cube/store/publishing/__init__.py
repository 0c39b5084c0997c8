"""Publish a store: it appears at its path complete, or not at all."""
