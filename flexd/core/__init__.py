"""Shared leaf modules: keys, layout, placement, errors, units, small durable files. Imports nothing else of flexd."""
