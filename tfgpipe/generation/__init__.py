"""Tokens are generated on several devices, in groups of prompts."""

from tfgpipe.generation.caches import CacheGroups
from tfgpipe.generation.groups import GroupedGeneration, install

__all__ = ["CacheGroups", "GroupedGeneration", "install"]
