"""Embedding tables on the training ranks: sharded over all ranks, with hot rows replicated in tiers."""
