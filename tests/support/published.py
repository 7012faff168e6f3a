"""Families whose published checkpoints transformers cannot read, as in newer_checkpoints.py."""

from tests.support import ling25, published_minimax
from tests.support.sizes import Make

PUBLISHED: dict[str, dict[str, Make]] = {"minimax_published": published_minimax.CASES, "ling25": ling25.CASES}
PUBLISHED_SPLIT: dict[str, Make] = {"minimax_published-split": published_minimax.SPLIT, "ling25-split": ling25.SPLIT}
