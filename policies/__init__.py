"""Policies: pure functions from (view, rules, now) to orders and decisions, each with its reason."""
