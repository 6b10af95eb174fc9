"""What checkpoints cost on a GPU, with a model of a billion parameters: the part ``gpu``.

``part`` has the order of the rows; ``bench`` and ``saving`` what they share; ``steps`` training with saves; ``saves``
one save into host memory; ``restores`` restores, also after a kill (``killed`` is the process); ``one_save`` one save
to disk, also by other systems.
"""
