"""Tokens are generated on several devices, in groups of prompts."""

from tfgpipe.generation.caches import CacheGroups, HeldCache
from tfgpipe.generation.groups import GroupedGeneration, install

__all__ = ["CacheGroups", "GroupedGeneration", "HeldCache", "install"]
