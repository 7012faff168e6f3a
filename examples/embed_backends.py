"""A decoding loop of one's own over hybridrt's parts: model, pools and backends, without LLM, Engine or scheduler.

python examples/embed_backends.py [MODEL]
"""

import sys
from itertools import accumulate

import torch

from hybridrt import EngineConfig
from hybridrt.attention.registry import create_backend
from hybridrt.distributed.groups import TPGroup
from hybridrt.engine.tokenizer import load_tokenizer
from hybridrt.forward_batch import ForwardBatch, ForwardMode
from hybridrt.runtime.build import build_model, build_pools, load_target, make_plan


@torch.inference_mode()
def generate(config: EngineConfig, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy: prefills all prompts in one step, then decodes them together."""
    path, target = load_target(config, TPGroup())
    model, plan = build_model(config, target, path, progress=False), make_plan(config, target)
    pools = build_pools(config, target, plan)
    kv, table = pools.kv, pools.req_to_token
    backend = create_backend(
        config, target.model_config, layers=model.mixers(), kv_pool=kv, req_to_token_pool=table, device=target.device
    )
    with target.device:
        # Request i owns row i + 1, state slot i + 1 and an equal share of the KV pages; number 0 of each is scratch.
        n, share = len(prompts), plan.num_pages // len(prompts)
        rows = torch.arange(1, n + 1)
        table.admit(rows, rows)
        table.write_pages(rows.repeat_interleave(share), torch.arange(share).repeat(n), torch.arange(n * share) + 1)

        tokens, computed, mode = prompts, [0] * n, ForwardMode.EXTEND
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_tokens):
            new, lens = [len(t) for t in tokens], [c + len(t) for c, t in zip(computed, tokens)]
            ends = torch.tensor(list(accumulate(new, initial=0)), dtype=torch.int32)
            positions = torch.cat([torch.arange(c, end) for c, end in zip(computed, lens)])
            batch = ForwardBatch(
                forward_mode=mode,
                input_ids=torch.tensor([t for request in tokens for t in request]),
                positions=positions,
                req_pool_indices=rows.int(),
                seq_lens=torch.tensor(lens, dtype=torch.int32),
                query_start_loc=ends,
                out_cache_loc=table.token_slots(rows.repeat_interleave(torch.tensor(new)), positions),
                num_real=n,
                num_decode_rows=n if mode is ForwardMode.DECODE else 0,
                attn_backend=backend,
                seq_lens_cpu=lens,
                query_lens_cpu=new,
            )
            backend.prepare(batch)
            hidden = model(batch)
            if mode is ForwardMode.DECODE:
                backend.commit(batch)
            tokens = model.logits(hidden[ends[1:] - 1]).argmax(-1, keepdim=True).tolist()
            outputs = [output + token for output, token in zip(outputs, tokens)]
            computed, mode = lens, ForwardMode.DECODE
    return outputs


def main(model: str) -> None:
    config = EngineConfig(model, max_running_requests=2, max_model_len=256)
    path, _ = load_target(config, TPGroup())
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None, f"{path} has no tokenizer"
    texts = ["def read_lines(path):", "import "]
    for text, output in zip(texts, generate(config, [tokenizer.encode(t) for t in texts], 64)):
        print(f"{text}{tokenizer.decode(output)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["embedded"])
