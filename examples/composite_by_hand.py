"""The composite built by hand: pools, both sides, a prompt step, and a decode step that is captured and replayed.

python examples/composite_by_hand.py
"""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from hybridrt.base.forward_batch import ForwardBatch, ForwardMode
from hybridrt.embedding import EngineConfig, LoadedModel, load
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backend import HybridLinearAttnBackend
from hybridrt.recurrent.backends import load_attention_backend
from hybridrt.recurrent.mamba2 import Mamba2AttnBackend

PAGE_SIZE, MAX_LEN = 16, 128


class ByHand:
    """Falcon-H1 for requests in rows 1 to n. Row, slot and page 0 of each pool are padding."""

    def __init__(self, loaded: LoadedModel, num_rows: int) -> None:
        self.model, self.device, self.num_rows = loaded.model, loaded.target.device, num_rows
        self.layers = loaded.model.mixers()  # the recurrent layers by id; in Falcon-H1 each layer is both kinds
        self.make_pools(loaded)
        self.backend = self.make_backend()
        self.lend_memory()

    def make_pools(self, loaded: LoadedModel) -> None:
        """KV for the attention layers, states for the recurrent ones, and the table from rows to both."""
        config, target = loaded.model.config, loaded.target
        attention = [part.attn for part in loaded.model.modules() if hasattr(part, "attn")]
        self.attention_ids = [layer.layer_id for layer in attention]
        shape = state_shape(config.linear["mamba2"])
        spec = MambaPoolSpec({shape: list(self.layers)}, target.dtype, target.state_dtype, mode=target.state_mode)
        states = MambaPool(spec, num_slots=self.num_rows, num_rows=self.num_rows, device=self.device)
        pages = self.num_rows * MAX_LEN // PAGE_SIZE
        groups = {attention[0].spec: self.attention_ids}
        self.kv_pool = KVPool(groups, num_pages=pages, page_size=PAGE_SIZE, device=self.device)
        self.table = HybridReqToTokenPool(
            num_rows=self.num_rows, max_context=MAX_LEN, page_size=PAGE_SIZE, mamba_pool=states, device=self.device
        )

    def make_backend(self) -> HybridLinearAttnBackend:
        """One backend for each kind of layer; the composite sends each layer to its own."""
        attention = load_attention_backend("auto", self.device)
        full = attention(kv_pool=self.kv_pool, req_to_token_pool=self.table)
        chunk_size = self.model.config.linear["mamba2"].chunk_size
        linear = Mamba2AttnBackend(layers=self.layers, req_to_token_pool=self.table, chunk_size=chunk_size)
        return HybridLinearAttnBackend(full, linear, full_attn_layers=self.attention_ids)

    def lend_memory(self) -> None:
        """Row i gets state slot i, zeroed, and the i-th share of the pages."""
        rows = torch.arange(1, self.num_rows + 1, device=self.device)
        self.table.admit_rows(rows, rows)
        share = MAX_LEN // PAGE_SIZE
        index = torch.arange(share, device=self.device).repeat(self.num_rows)
        pages = torch.arange(1, self.num_rows * share + 1, device=self.device)
        self.table.write_pages(rows.repeat_interleave(share), index, pages)

    def ints(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def prompt_batch(self, prompts: list[list[int]]) -> ForwardBatch:
        """An extend step: prompt i goes to row i + 1."""
        lens = [len(prompt) for prompt in prompts]
        rows, starts = self.ints(list(range(1, len(prompts) + 1))), self.ints([0, *accumulate(lens)])
        positions = self.ints([position for count in lens for position in range(count)])
        places = self.table.token_slots(rows.repeat_interleave(self.ints(lens)), positions)
        ids = self.ints([token for prompt in prompts for token in prompt])
        return ForwardBatch(
            ForwardMode.EXTEND, ids, positions, rows, self.ints(lens), starts, places, num_real=len(prompts),
            num_decode_rows=0, attn_backend=self.backend, seq_lens_cpu=lens, query_lens_cpu=lens,
        )  # fmt: skip

    def run(self, batch: ForwardBatch) -> Tensor:
        """The next token of each row, [B]: the model, then the greedy choice."""
        hidden = self.model(batch)
        return self.model.logits(hidden[batch.query_start_loc[1:].long() - 1]).argmax(-1)


class DecodeGraph:
    """A decode step of `num_rows` rows, recorded once over tensors that stay where they are."""

    def __init__(self, hand: ByHand, num_rows: int) -> None:
        self.hand = hand
        self.view = hand.backend.init_cuda_graph_state(num_rows, num_rows)
        ids, positions, rows, places = (hand.ints([0] * num_rows) for _ in range(4))
        lens, starts = hand.ints([hand.backend.seq_len_fill] * num_rows), hand.ints(list(range(num_rows + 1)))
        # A capture runs no request: all of its rows are padding.
        self.batch = ForwardBatch(
            ForwardMode.DECODE, ids, positions, rows, lens, starts, places, num_real=0, num_decode_rows=num_rows,
            attn_backend=hand.backend,
        )  # fmt: skip
        self.tokens = torch.zeros(num_rows, dtype=torch.int64, device=hand.device)
        hand.backend.prepare(self.batch, graph=self.view)
        self.launch = self.record()

    def step(self) -> None:
        """What the graph holds. The commit makes the new token part of the recurrent state."""
        self.tokens.copy_(self.hand.run(self.batch))
        self.hand.backend.commit(self.batch)

    def record(self) -> Callable[[], None]:
        """A CUDA graph; on a CPU the step itself, over the same static tensors."""
        self.step()
        if self.hand.device.type != "cuda":
            return self.step
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def replay(self, tokens: Tensor, lens: list[int]) -> Tensor:
        """Token i goes after the `lens[i]` tokens of row i + 1; returns the next token of each row."""
        batch, count = self.batch, len(lens)
        batch.input_ids[:count] = tokens
        batch.req_pool_indices[:count] = torch.arange(1, count + 1, device=self.hand.device)
        batch.positions[:count] = self.hand.ints(lens)
        batch.seq_lens[:count] = batch.positions[:count] + 1
        batch.out_cache_loc.copy_(self.hand.table.token_slots(batch.req_pool_indices, batch.positions))
        batch.num_real, batch.seq_lens_cpu = count, [n + 1 for n in lens]
        self.hand.backend.prepare(batch, graph=self.view)  # outside the graph: this step's metadata
        self.launch()
        return self.tokens[:count].clone()


@torch.inference_mode()
def generate(loaded: LoadedModel, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The greedy continuation of each prompt; the graph has one row more, which stays padding."""
    hand = ByHand(loaded, num_rows=len(prompts) + 1)
    graph = DecodeGraph(hand, num_rows=hand.num_rows)
    batch = hand.prompt_batch(prompts)
    hand.backend.prepare(batch)
    found = [hand.run(batch)]
    for step in range(num_tokens - 1):
        found.append(graph.replay(found[-1], [len(prompt) + step for prompt in prompts]))
    return torch.stack(found, 1).tolist()


def main() -> None:
    loaded = load(EngineConfig("embedded"))
    tokenizer = loaded.tokenizer()
    assert tokenizer is not None, "the embedded model has a tokenizer"
    texts = ["def read_lines(path):", "class Stack:"]
    outputs = generate(loaded, [tokenizer.encode(text) for text in texts], num_tokens=48)
    for text, output in zip(texts, outputs):
        print(f"{text}{tokenizer.decode(output)}\n")


if __name__ == "__main__":
    main()
