"""The daemon's HTTP side: admin API, metrics page and the listeners that serve them."""
