"""The image: one rank's state as the bytes of a ``.safetensors`` file: its layout, its header, its tree."""
