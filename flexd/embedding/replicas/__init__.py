"""Synchronisation of replicas: the rows that a step touches, the sums of their gradients, and the update."""
