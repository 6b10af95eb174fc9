"""Small words of messages; nothing here knows what the messages are about."""

from __future__ import annotations

_VOWELS = ("a", "e", "i", "o", "un")


def with_article(noun: str) -> str:
    """Put ``a`` or ``an`` before a noun, by its letters: ``an int``, ``a dict``."""
    return f"{'an' if noun.lower().startswith(_VOWELS) else 'a'} {noun}"
