"""The trainer's side: embedding tables sharded over ranks, with hot rows replicated in tiers."""
