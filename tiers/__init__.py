"""Tiers: the levels that checkpoints are stored on. A tier receives its backend; it imports none."""
