"""The image: one rank's state as the bytes of a ``.safetensors`` file, laid out once and copied as it is.

Writing: ``describe`` walks a state, ``plan_layout`` says where each tensor lies, ``Layout.header`` gives the first
bytes, ``as_bytes`` and ``copy_whole`` the rest. Reading: ``read_header`` checks what nobody vouches for,
``plan_fill`` restores in place, ``plan_load`` makes a nested dict. Nothing here reads or writes storage, starts
threads, or knows tiers.
"""

from tierfall.core.image.build import Fill, Want
from tierfall.core.image.choices import Choices
from tierfall.core.image.codec import register_codec
from tierfall.core.image.fill import FillPlan, plan_fill
from tierfall.core.image.header import ImageHeader, StoredTensor, read_header
from tierfall.core.image.item import Item, OnResize, item, resize_rules
from tierfall.core.image.layout import Layout, Slot, plan_layout
from tierfall.core.image.load import LoadPlan, plan_load
from tierfall.core.image.omissions import omissions
from tierfall.core.image.recall import Recall
from tierfall.core.image.tensors import as_bytes, copy_whole
from tierfall.core.image.view import SourceTensor, StateView
from tierfall.core.image.walk import describe

__all__ = [
    "Choices",
    "Fill",
    "FillPlan",
    "ImageHeader",
    "Item",
    "Layout",
    "LoadPlan",
    "OnResize",
    "Recall",
    "Slot",
    "SourceTensor",
    "StateView",
    "StoredTensor",
    "Want",
    "as_bytes",
    "copy_whole",
    "describe",
    "item",
    "omissions",
    "plan_fill",
    "plan_layout",
    "plan_load",
    "read_header",
    "register_codec",
    "resize_rules",
]
