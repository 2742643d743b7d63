"""Replay accesses through planners: bytes sent and time taken, step by step."""
