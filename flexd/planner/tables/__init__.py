"""Sharding types and pooling places of whole tables: one problem over tables, for the busiest rank of every phase."""
