"""What a user could pick instead: the same state saved, made durable and loaded by tierfall and by its peers.

Peers that are not installed are left out and named; none is needed for anything else.
"""
