"""The prediction head on a GPU, in float32: its drafts are the naive head's, and the tokens transformers'."""

from pathlib import Path

import pytest

from tests.gpu.rig import DEVICE, GPU
from tests.speculative.test_mtp import assert_chains, greedy_asks, watch
from tests.support.checkpoints import Checkpoint
from tests.support.mtp_oracle import HEADS, NaiveHead, write_with_head
from tests.support.speculation import Rig
from tests.support.ties import check_greedy

pytestmark = GPU


@pytest.mark.parametrize(("mode", "drafts", "topk", "chunk"), [
    ("replay", 3, 1, 8192), ("intermediate", 7, 1, 4), ("intermediate", 7, 2, 8192),
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen", "nemotron"])
def test_drafts_are_those_of_the_naive_head(
    name: str, mode: str, drafts: int, topk: int, chunk: int, tmp_path: Path
) -> None:
    """Steps as graphs, launched ahead of their results; prompts whole and in chunks; chains and trees."""
    checkpoint = Checkpoint(tmp_path, write_with_head(HEADS[name], tmp_path))
    rig = Rig(tmp_path, device=DEVICE, mode=mode, drafts=drafts, topk=topk, rows=4, method="mtp")
    asks = greedy_asks()
    watched = watch(rig, Rig(tmp_path, rows=4).futures(asks), drafts, topk)
    for (i, _), output in rig.run(asks, watched, chunk, overlap=True).items():
        check_greedy(output.token_ids, checkpoint.logits(asks[int(i)].prompt, output.token_ids), name)
    assert rig.counters.accepted > 20
    assert_chains(NaiveHead(tmp_path, checkpoint.model), watched.seen, -(-drafts // topk))
