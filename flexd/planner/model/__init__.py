"""The cost model: what a placement sends, how long that takes, and the memory it needs."""
