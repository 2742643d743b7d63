"""The cost model: bytes, seconds and memory of a placement."""
