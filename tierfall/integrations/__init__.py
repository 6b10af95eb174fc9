"""Integrations: tierfall as the storage of other checkpoint libraries.

``path`` provides ``tiers://`` to any library that accepts an fsspec path. Importing this package registers it; fsspec
also finds it as an entry point of the installed package. ``transformers`` is for Hugging Face's Trainer and accelerate.
"""

from fsspec import register_implementation  # type: ignore[import-untyped]

register_implementation("tiers", "tierfall.integrations.path.TierFileSystem", clobber=True)
