"""Ranks: who takes part in a run, how they reach each other, and how they come to one decision.

Messages go along a tree (``topology``): from a rank to the leader of its node, from leaders to rank 0, and back. They
travel through queues of ``torch.distributed`` stores of tierfall's own (``transport``, made by ``rendezvous``): no
collective of the training is used. ``message_tree`` gathers what all ranks report about one topic, and announces what
rank 0 decides; ``agreement`` lets the calling threads of all ranks agree, as in ``open`` and ``restore``.
"""
