"""Scheduler: the coordinator and its ledger (what is where), and the workers that move bytes (how it gets there)."""
