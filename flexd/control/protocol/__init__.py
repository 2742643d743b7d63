"""What travels between daemon and ranks, and the transports that carry it."""
