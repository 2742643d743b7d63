"""Replicas: which rows have copies, where they are, and how their gradients are synchronised."""
