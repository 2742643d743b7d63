"""Tables of unbounded ids: which ids have rows of their own, decided in the step by the home of each id."""
