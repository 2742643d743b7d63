"""The optimiser: which rows get copies under the replica budget."""
