"""The demo: a real training run that is killed during a flush, restores, and continues with identical losses.

It has a small model, its data, a trainer process, and the acts of the demo (``story``). It uses the public API of
tierfall, reads the event log of its run, and inspects tiers with ``tierfall.ops.reader``.
"""
