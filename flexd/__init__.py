"""flexd keeps the embedding rows of a running recommender training in the right places."""

from __future__ import annotations

__version__ = "0.1.0"
