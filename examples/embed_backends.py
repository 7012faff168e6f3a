"""A serving loop of one's own over hybridrt.embedding: admission while others run, chunked prefill, graphs, snapshots.

python examples/embed_backends.py [MODEL]
"""

import sys
from collections import deque
from dataclasses import dataclass, field

import torch

from hybridrt.embedding import EngineConfig, build, load, plan_memory


@dataclass
class Request:
    """`tokens` are the prompt and the output so far; KV and state of the first `computed` are written."""

    tokens: list[int]
    prompt_len: int
    computed: int = 0
    row: int = -1
    pages: list[int] = field(default_factory=list)
    borrowed: int = 0  # pages at the head that belong to the shared prefix

    @property
    def decodes(self) -> bool:
        return self.computed >= self.prompt_len


class Loop:
    """First come, first served, greedy. Rows, state slots and pages count from 0; the last of each is scratch.

    Args:
        shared: tokens that all prompts have in common, a multiple of the page size. They are computed once: the state
            after them is kept in a slot of its own, their KV in pages that later requests share.
    """

    def __init__(self, config: EngineConfig, budget_bytes: int, num_tokens: int, shared: int = 0) -> None:
        self.loaded = loaded = load(config)
        self.plan = plan_memory(loaded, budget_bytes=budget_bytes, cache_slots=1)
        self.runtime = build(loaded, self.plan)
        self.graphs = self.runtime.capture()
        self.chunk, self.num_tokens, self.shared = config.chunked_prefill_size, num_tokens, shared
        self.rows, self.pages = list(range(self.plan.num_rows))[::-1], list(range(self.plan.num_pages))[::-1]
        self.prefix_slot, self.prefix_pages = self.plan.num_slots - 1, list[int]()  # a row's slot has its number
        self.prefix: list[int] | None = None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """The first prompt starts alone; the others join while it runs."""
        requests = [Request(list(prompt), len(prompt)) for prompt in prompts]
        self.waiting.append(requests[0])
        self.step()
        self.waiting.extend(requests[1:])
        while self.waiting or self.running:
            self.step()
        return [request.tokens[request.prompt_len :] for request in requests]

    def step(self) -> None:
        """Every decoding request gains a token; what is left of the step's tokens goes to prompts."""
        while self.waiting and self.admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        step = sorted(self.running, key=lambda request: not request.decodes)  # decode rows come first
        counts = self.cut(step)
        work = [(request, count) for request, count in zip(step, counts) if count]
        logits = self.compute(work)
        for (request, count), token in zip(work, logits.argmax(-1).tolist()):
            request.computed += count
            if request.computed == len(request.tokens):
                request.tokens.append(token)
            if request.computed == self.shared and self.prefix is None:
                self.keep_prefix(request)
            if len(request.tokens) == request.prompt_len + self.num_tokens:
                self.free(request)

    def admit(self, request: Request) -> bool:
        """Lends a row, its slot and pages for all tokens, if there are enough."""
        hit = self.prefix is not None and request.tokens[: self.shared] == self.prefix
        hit = hit and request.prompt_len > self.shared
        head = self.prefix_pages if hit else []
        need = (
            -(-(request.prompt_len + self.num_tokens) // self.plan.page_size) - len(head) if self.plan.num_pages else 0
        )
        if not self.rows or need > len(self.pages):
            return False
        request.row = self.rows.pop()
        request.pages = head + [self.pages.pop() for _ in range(need)]
        request.borrowed = len(head)
        self.runtime.admit([request.row], [request.row])
        self.runtime.write_pages([request.row] * len(request.pages), range(len(request.pages)), request.pages)
        if hit and self.plan.num_slots:
            self.runtime.restore([self.prefix_slot], [request.row])
        if hit:
            request.computed = self.shared
        return True

    def cut(self, step: list[Request]) -> list[int]:
        """Tokens of each request in this step. A chunk ends where the shared prefix does: its state is wanted."""
        counts, left = [], self.chunk
        for request in step:
            first = request.computed < self.shared < request.prompt_len and self.prefix is None
            rest = (self.shared if first else len(request.tokens)) - request.computed
            counts.append(1 if request.decodes else min(rest, left))
            left -= counts[-1]
        return counts

    def compute(self, work: list[tuple[Request, int]]) -> torch.Tensor:
        """Logits of the last token of each request, [B, vocab]."""
        rows, lens = [r.row for r, _ in work], [r.computed + n for r, n in work]
        ids = [t for r, n in work for t in r.tokens[r.computed : r.computed + n]]
        decoding = sum(r.decodes for r, _ in work)
        if decoding == len(work) and self.graphs.fits(decoding):
            return self.graphs.replay(input_ids=ids, rows=rows, seq_lens=lens)
        batch = self.runtime.batch(
            input_ids=ids, rows=rows, seq_lens=lens, query_lens=[n for _, n in work], num_decode_rows=decoding
        )
        self.runtime.prepare(batch)
        hidden = self.runtime.forward(batch)
        if decoding:
            self.runtime.commit(batch)
        return self.runtime.logits(hidden[batch.query_start_loc[1:].long() - 1])

    def keep_prefix(self, request: Request) -> None:
        """The request's state becomes a snapshot, and its first pages are shared."""
        if self.plan.num_slots:
            self.runtime.snapshot([request.row], [self.prefix_slot])
        self.prefix = request.tokens[: self.shared]
        request.borrowed = self.shared // self.plan.page_size if request.pages else 0
        self.prefix_pages = request.pages[: request.borrowed]

    def free(self, request: Request) -> None:
        self.rows.append(request.row)
        self.pages.extend(request.pages[request.borrowed :])
        self.running.remove(request)


def main(model: str) -> None:
    loop = Loop(EngineConfig(model, max_running_requests=2, max_model_len=256), budget_bytes=2**28, num_tokens=64)
    tokenizer = loop.loaded.tokenizer()
    assert tokenizer is not None, f"{model} has no tokenizer"
    texts = ["def read_lines(path):", "import ", "class Stack:"]
    for text, output in zip(texts, loop.generate([tokenizer.encode(t) for t in texts])):
        print(f"{text}{tokenizer.decode(output)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["embedded"])
