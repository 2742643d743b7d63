"""Shared leaf modules: keys, layout, placement, tap counts, errors, units, files. They import no other package."""
