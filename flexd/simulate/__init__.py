"""Replays accesses through planners: the bytes that would move, step by step, and the time they would take."""
