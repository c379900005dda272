"""Small measurements, collected with the launch of an update and received with its completion."""
