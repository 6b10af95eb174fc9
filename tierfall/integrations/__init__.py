"""Integrations: tierfall beneath what others write checkpoints by.

``path`` serves ``tiers://`` to whatever takes an fsspec path. Importing this package registers it; where tierfall is
installed, fsspec finds it by itself.
"""

from fsspec import register_implementation  # type: ignore[import-untyped]

register_implementation("tiers", "tierfall.integrations.path.TierFileSystem", clobber=True)
