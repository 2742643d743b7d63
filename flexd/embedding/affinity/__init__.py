"""Affinity: samples are trained in the node that has their rows."""
