"""Rows that are not in fast memory: in host memory beside an accelerator, or in a file."""
