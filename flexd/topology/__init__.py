"""The cluster that training runs on: link bandwidths, latencies, and the files that describe them."""
