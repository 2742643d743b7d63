"""Checkpoints and whole-table views, independent of the number of ranks."""
