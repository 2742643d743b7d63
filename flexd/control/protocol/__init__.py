"""The messages between daemon and ranks, and the transports that carry them."""
