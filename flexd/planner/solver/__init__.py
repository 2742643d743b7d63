"""Choose the rows that get copies within the replica budget."""
