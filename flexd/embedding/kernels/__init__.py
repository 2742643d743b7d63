"""Measures the kernels of look-up, pooling and update on the device that runs them."""
