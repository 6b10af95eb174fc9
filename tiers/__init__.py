"""Tiers: levels of the chain. A tier is handed its backend; it never imports one."""
