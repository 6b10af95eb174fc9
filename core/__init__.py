"""Core: values, errors, contracts, image layout, manifest, ledger, capture, flush and restore.

Everything here may be imported by every other room; nothing here imports one of them (architecture.md, section 7).
"""
