"""How accesses arrive at the daemon and how trainers emit them."""
