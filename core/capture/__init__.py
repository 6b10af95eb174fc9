"""Capture: how a state becomes an image while the training goes on, and what keeps it from changing meanwhile."""
