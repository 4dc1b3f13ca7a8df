"""Orders of samples: which one stands at which position of an epoch. Pure: NumPy, no torch."""
