"""Which of several daemons leads: a lease in a place that outlives each of them, and a term number that only grows."""
