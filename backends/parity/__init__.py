"""Parity of images: stripes, their code, the sets that a node keeps, and rebuilding what a node has lost."""
