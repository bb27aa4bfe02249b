"""Masks: which keys each query may see.

A mask is an immutable object that can be compared and printed; one that holds no tensor can be hashed as well. Its text
drawing is its ``str``. The definitions, with p = i + len_kv - len_q the position of query i among the keys:

=============  ==========================================================================================
Dense          every key
Causal         key j where j <= p (``align="top-left"``: p = i)
SlidingWindow  key j where p - left <= j <= p + right, or j < keep_first (and j <= p + right)
PrefixLM       key j where j < prefix or j <= p
DilatedWindow  key j = p + t * dilation for a whole t in [-left, right]
Document       key j in the same document as i; with ``causal``, aligned at each document's end
HashBucket     key j in the same bucket as i; with ``causal``, j <= p
BlockSparse    key j where the block of the pair is set
a & b          key j that both allow
=============  ==========================================================================================

Dense, Causal, SlidingWindow, PrefixLM and Document are *interval masks*: the keys of a row form one interval (with
keep_first, two). Any ``&`` of them is one interval again, and lowers to one kind. ``to_dense`` is written from the
definition, and ``visible.py`` works from the lowered form, so that each can be tested against the other.

Adding a mask: its trait in csrc/mask/, a dataclass here, its lowered form in visible.py.
"""

from .bands import Causal, Dense, PrefixLM, SlidingWindow
from .base import Lowered, Mask, has_values, lower
from .blocks import BlockSparse
from .dilated import DilatedWindow
from .document import Document
from .hash import HashBucket
from .intersection import Intersection, PerSequence

__all__ = [
    "BlockSparse",
    "Causal",
    "Dense",
    "DilatedWindow",
    "Document",
    "HashBucket",
    "Intersection",
    "Lowered",
    "Mask",
    "PerSequence",
    "PrefixLM",
    "SlidingWindow",
    "has_values",
    "lower",
]
