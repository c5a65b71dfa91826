"""Tasks of KerasHub generate on several devices, in groups of prompts."""

from tfgpipe.generation.groups import GroupedGeneration, install

__all__ = ["GroupedGeneration", "install"]
