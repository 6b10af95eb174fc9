"""Ranks: who takes part in a run, how they reach each other, and how they come to one decision.

Messages go along a tree (``topology``): from a rank to the leader of its node, from leaders to rank 0, and back. They
travel through queues of ``torch.distributed`` stores that belong to tierfall alone (``post``, made by ``joining``), so
that no collective of the training is ever touched. ``council`` gathers what all ranks say about one thing and hands
out what rank 0 decides; ``together`` lets the calling threads of all ranks agree, as in ``open`` and ``restore``.
"""
