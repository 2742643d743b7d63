"""Exchange of one look-up: its route, the hops that rows and gradients take, and the collectives under them."""
