"""One look-up's way to the rows it needs: routes, hops and the collectives under them."""
