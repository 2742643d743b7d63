"""Row storage of one rank: home rows, replica pool, initial values, memory accounting."""
