"""Packing: the chunks of a stored image compressed one by one, and the record of where they lie."""
