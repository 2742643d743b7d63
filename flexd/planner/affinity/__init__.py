"""Rows near the samples that use them: homes by node, and samples dealt to nodes (HET-GMP, SIGMOD 2022, made exact).

A global batch is a set: which rank trains which of its samples changes nothing but the order of sums. The model is a
hypergraph: samples are vertices, rows hyperedges, each joined to a fixed vertex for the node of its home; connectivity
minus one is the number of rows that cross between nodes.
"""
