"""The contract: what tierfall promises, tested from outside.

Only public names of ``tierfall``, its command line, its YAML and the bytes on disk are used here, so that these tests
survive any redesign. A test of this folder changes only together with a promise. ``kit.py`` has what they share.
"""
