"""What tierfall costs, as ratios against bare copies, writes and reads of the same bytes in the same run.

``python -m benchmarks`` (``make bench``) runs it; docs/benchmarks.md says how, and has results.
"""
