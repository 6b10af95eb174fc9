"""Capture: copying a state into an image while training continues, and delaying changes to it until it is copied."""
