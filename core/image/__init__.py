"""The image: one rank's state as the bytes of a ``.safetensors`` file, with its layout, header and tree."""
