"""Modules for ``torch.nn``: attention layers over ``flashmsa.attention``."""

from .self_attention import SelfAttention

__all__ = ["SelfAttention"]
