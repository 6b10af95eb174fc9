"""Ranks: the topology of a run, the transport of messages, and how the ranks come to one decision.

Messages pass along a tree (``topology``): from a rank to the leader of its node, from leaders to rank 0, and back. They
travel through queues in ``torch.distributed`` stores of tierfall's own (``transport``, set up by ``rendezvous``); no
collective of the training is used. ``message_tree`` gathers what all ranks contribute to a topic and announces what
rank 0 decides; ``agreement`` does both for one call that all ranks make, as ``open`` and ``restore``. ``messages``
holds what is common to all messages: their JSON form, and the validation of what other ranks send.
"""
