"""Calls of the other operations at the shapes of a model, in bfloat16: attention, experts, norms, products, sampling.

See `kernel_cases.py`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.model_config import AttentionConfig, ModelConfig
from hybridrt.kernels.attention.kv_codes import encode
from hybridrt.kernels.sampling.sampling import Penalties
from hybridrt.layers.rotary import rotary_table
from tests.support.kernel_cases import Case, int32, normal, poisoned

PAGE_SIZE, PAGES, MAX_CONTEXT = 16, 1000, 4096


def paged(
    config: AttentionConfig, seq_lens: list[int], max_context: int = MAX_CONTEXT
) -> tuple[dict[str, Any], list[int]]:
    """KV caches with shuffled pages for rows of these lengths; values past them are large. And the pages used."""
    shape = (PAGES + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    held = ("k_cache",) if config.latent else ("k_cache", "v_cache")
    caches = {name: torch.full(shape, 1e4, dtype=torch.bfloat16) for name in held}
    table = torch.full((len(seq_lens) + 1, max_context), -(2**30), dtype=torch.int32)
    free, used = torch.randperm(PAGES).add(1).tolist(), []
    for row, length in enumerate(seq_lens, 1):
        for first in range(0, length, PAGE_SIZE):
            page, count = free.pop(), min(PAGE_SIZE, length - first)
            used.append(page)
            table[row, first : first + PAGE_SIZE] = torch.arange(PAGE_SIZE, dtype=torch.int32) + page * PAGE_SIZE
            for cache in caches.values():
                cache[page, :count] = normal(count, *shape[2:])
    table[0] = 0
    if config.latent:
        caches["v_cache"] = caches["k_cache"][..., : config.v_head_dim]
    return caches | {"req_to_token": table.to(torch.get_default_device())}, used


def attention_decode(config: AttentionConfig, tokens: int, times: int = 1) -> Case:
    """Eight rows, `times` over. Of four times so many, a row's last program may join the parts. With many of them the
    device is full, and only the longest context is split."""
    lengths = [tokens, 4, 63, 64, 65, 1000, 3000, 257]
    args, _ = paged(config, lengths, MAX_CONTEXT if times == 1 else 4 * MAX_CONTEXT)
    q, _ = normal(len(lengths) * times, tokens, (config.num_heads + 3) * config.head_dim).split(
        [config.num_heads * config.head_dim, 3 * config.head_dim], -1
    )
    args |= {
        "q": q.unflatten(-1, (config.num_heads, config.head_dim)), "rows": int32([*range(1, len(lengths) + 1)] * times),
        "seq_lens": int32(lengths * times), "scale": config.head_dim**-0.5,
    }  # fmt: skip
    if times > 1:
        args["max_len"] = max(lengths)  # the reference gathers that many keys for each row
    return Case("attention_decode", args)


def attention_extend(config: AttentionConfig, new: list[int], sliding_window: int | None = None) -> Case:
    computed = [0, 900, 77, 64]
    lengths = [a + b for a, b in zip(new, computed)]
    args, _ = paged(config, lengths)
    args |= {
        "q": normal(sum(new), config.num_heads, config.head_dim), "rows": int32(range(1, len(new) + 1)),
        "query_start_loc": int32([sum(new[:i]) for i in range(len(new) + 1)]), "seq_lens": int32(lengths),
        "scale": config.head_dim**-0.5, "query_lens": new, "seq_lens_host": lengths, "sliding_window": sliding_window,
    }  # fmt: skip
    return Case("attention_extend", args, decode=False)


def with_codes(make: Callable[[], Case]) -> Case:
    """A case whose caches hold e4m3 codes of their numbers."""
    case, scales = make(), (0.02, 0.03)
    names, latent = [name for name in ("k_cache", "v_cache", "cache") if name in case.args], False
    for name, scale in zip(names, scales):
        plain = case.args[name]
        latent |= name == "v_cache" and not plain.is_contiguous()
        keys = case.args[names[0]]
        case.args[name] = keys[..., : plain.shape[-1]] if latent else encode(plain, scale)
    if names == ["cache"]:
        case.args["scale"] = scales[0]
    else:
        case.args |= {"k_scale": scales[0], "v_scale": scales[0] if latent else scales[1]}
    return case


def with_sinks(make: Callable[[], Case]) -> Case:
    """A case of attention whose heads have sinks, from far below the scores of keys to far above."""
    case = make()
    case.args["sinks"] = torch.linspace(-4.0, 8.0, case.args["q"].shape[-2])
    return case


def latent_weights(config: AttentionConfig) -> dict[str, Any]:
    assert config.latent is not None
    heads, dims = config.num_heads, config.latent
    up_k, up_v = (
        normal(heads, dims.nope_dim, dims.rank),
        normal(heads, dims.rank, dims.value_dim, scale=dims.rank**-0.5),
    )
    norm = 1 + normal(dims.rank, scale=0.2, dtype=torch.float32)
    return {"up_k": up_k * dims.rank**-0.5, "up_v": up_v, "norm": norm, "norm_eps": 1e-6}


def latent_extend(config: AttentionConfig, new: list[int]) -> Case:
    assert config.latent is not None
    args = attention_extend(config, new).args
    q = normal(sum(new), config.num_heads, config.latent.nope_dim + config.latent.rope_dim)
    return Case("latent_extend", args | {"q": q, "scale": config.scale} | latent_weights(config), decode=False)


def latent_product(config: AttentionConfig, op: str) -> Case:
    """Queries of two tokens into the space of latent vectors, or sums of them out of it."""
    dims = config.latent
    assert dims is not None
    width = dims.rank if op == "from_latent" else dims.nope_dim + dims.rope_dim
    x = normal(2, config.num_heads + 1, width)[:, 1:]
    return Case(op, {"x" if op == "from_latent" else "q": x} | latent_weights(config))


def write_latent(config: AttentionConfig, rotated: bool) -> Case:
    dims, tokens, angles = config.latent, 50, torch.rand(4000, 32) * 6.28
    assert dims is not None
    widths = [config.num_heads * (dims.nope_dim + dims.rope_dim), dims.rank + dims.rope_dim]
    q, k = normal(tokens, sum(widths)).split(widths, -1)
    caches, written = kv_write(config, tokens)
    args = {
        "q": q.unflatten(-1, (config.num_heads, -1)), "k": k, "positions": torch.randint(0, 4000, (tokens,)),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), -1) if rotated else None, "cache": caches["k_cache"],
        "out_cache_loc": caches["out_cache_loc"],
    }  # fmt: skip
    return Case("write_latent", args | latent_weights(config), {"cache": written["k_cache"]}, consumed=("q",))


def rotary(op: str, config: ModelConfig) -> Case:
    """With the norms of queries and keys where the model has them."""
    attention, tokens = config.attention, 50
    widths = [heads * attention.head_dim for heads in (attention.num_heads, *[attention.num_kv_heads] * 2)]
    q, k, v = (t.unflatten(-1, (-1, attention.head_dim)) for t in normal(tokens, sum(widths)).split(widths, -1))
    norms = dict.fromkeys(("q_weight", "k_weight"))
    if config.architecture.startswith("Qwen"):
        norms = {name: 1 + normal(attention.head_dim, scale=0.2, dtype=torch.float32) for name in norms}
    args = {
        "q": q, "k": k, "positions": torch.randint(0, 4000, (tokens,)), "eps": 1e-6,
        "cos_sin": rotary_table(config, config.attention, 4000, torch.get_default_device()), **norms,
    }  # fmt: skip
    if op == "qk_norm_rotary":
        return Case(op, args, consumed=("q", "k"))
    caches, written = kv_write(attention, tokens)
    return Case(op, args | {"v": v} | caches, written, consumed=("q",))


def kv_write(config: AttentionConfig, tokens: int) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Caches, and a shuffled slot for each token."""
    slots = torch.randperm(PAGES * PAGE_SIZE)[:tokens] + PAGE_SIZE
    shape = (PAGES + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    pages = sorted({slot // PAGE_SIZE for slot in slots.tolist()})
    caches = {name: poisoned(*shape, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}
    return caches | {"out_cache_loc": slots.int().to(torch.get_default_device())}, dict.fromkeys(caches, pages)


def write_kv(config: AttentionConfig) -> Case:
    caches, written = kv_write(config, 50)
    k, v, _ = normal(50, config.num_kv_heads, 3 * config.head_dim).split([config.head_dim] * 3, -1)
    return Case("write_kv", {"k": k, "v": v} | caches, written, exact=True)


def norm(op: str, width: int, tokens: int) -> Case:
    x, _ = normal(tokens, width + 64).split([width, 64], -1)
    args: dict[str, Any] = {"x": x, "weight": 1 + normal(width, scale=0.2, dtype=torch.float32), "eps": 1e-5}
    if op == "rms_norm":
        return Case(op, args)
    return Case(op, args | {"residual": normal(tokens, width)}, {"residual": list(range(tokens))})


def gated_rms_norm(width: int, group_size: int, norm_before_gate: bool, tokens: int = 70) -> Case:
    x, gate, _ = normal(tokens, 2 * width + 64).split([width, width, 64], -1)
    args = {"x": x, "gate": gate, "weight": 1 + normal(width, scale=0.2, dtype=torch.float32), "eps": 1e-5}
    return Case("gated_rms_norm", args | {"group_size": group_size, "norm_before_gate": norm_before_gate})


def elementwise(op: str, width: int, tokens: int, gates: int | None = None) -> Case:
    more = {"sigmoid_mul": {"gate": normal(tokens, gates or width)}, "clamped_silu_and_mul": {"limit": 0.7}}
    return Case(op, {"x": normal(tokens, width)} | more.get(op, {}))


def skinny_linear(
    config: ModelConfig, tokens: int, activation: str | None, residual: bool, columns: int | None = None
) -> Case:
    hidden = config.hidden_size
    gates = 1 + (activation == "silu_and_mul")
    columns = columns or (2 * hidden if activation is None else config.hf.intermediate_size * gates)
    args = {
        "x": normal(tokens, hidden), "weight": normal(columns, hidden, scale=hidden**-0.5), "activation": activation,
        "norm_weight": 1 + normal(hidden, scale=0.2, dtype=torch.float32), "eps": 1e-5,
    }  # fmt: skip
    if not residual:
        return Case("skinny_linear", args)
    return Case("skinny_linear", args | {"residual": normal(tokens, hidden)}, consumed=("residual",))


def router_product(hidden: int, tokens: int) -> Case:
    """Logits of 32 experts, from float32 weights."""
    weight = normal(32, hidden, scale=hidden**-0.5, dtype=torch.float32)
    return Case("router_product", {"x": normal(tokens, hidden), "weight": weight})


def padded_rows() -> Tensor:
    """25 rows of two tokens each; the last three are padding."""
    return int32([*range(1, 23), 0, 0, 0])


def router_softmax(config: ModelConfig) -> Case:
    args = {"logits": normal(50, config.hf.num_experts, dtype=torch.float32), "top_k": config.hf.num_experts_per_tok}
    return Case("router_softmax", args | {"renormalize": True, "rows": padded_rows()})


def router_sigmoid_grouped(n_group: int, topk_group: int, shared: int) -> Case:
    bias = normal(128, scale=0.1, dtype=torch.float32)
    args = {"logits": normal(50, 128, dtype=torch.float32), "correction_bias": bias, "top_k": 6, "n_group": n_group}
    rest = {"topk_group": topk_group, "renormalize": True, "scaling": 2.5, "shared": shared, "rows": padded_rows()}
    return Case("router_sigmoid_grouped", args | rest)


def fused_experts(
    tokens: int, hidden: int, intermediate_size: int, num_experts: int, top_k: int, padding: int = 1
) -> Case:
    """Few tokens, where bandwidth counts, or many; the last are padding."""
    ids = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(tokens)]).int()
    ids[tokens - padding :] = -1
    weights = torch.rand(ids.shape)
    args = {
        "x": normal(tokens, hidden), "ids": ids, "weights": weights / weights.sum(1, keepdim=True),
        "w_up": normal(num_experts, 2 * intermediate_size, hidden, scale=hidden**-0.5),
        "w_down": normal(num_experts, hidden, intermediate_size, scale=intermediate_size**-0.5),
        "activation": "silu",
    }  # fmt: skip
    return Case("fused_experts", args, decode=tokens < 100)


def biased_experts(make: Callable[[], Case]) -> Case:
    """A case of experts as in gpt-oss."""
    case = make()
    (experts, rows, hidden), clamped = case.args["w_up"].shape, {"limit": 1.0, "alpha": 1.702}
    biases = {"b_up": normal(experts, rows, scale=0.3), "b_down": normal(experts, hidden, scale=0.3)}
    case.args.update(clamped | biases)
    return case


def draws(config: ModelConfig, filtered: bool) -> Case:
    """A batch of draws, the greedy among them; with filters each row has its own."""
    rows, vocab = 12, config.vocab_size

    def each(*values: float) -> Tensor:
        return torch.tensor([values[i % len(values)] for i in range(rows)])

    args: dict[str, Any] = {
        "logits": normal(rows, vocab, scale=3.0), "temperature": each(1.0, 0.7, 0.0, 1.5),
        "seeds": torch.arange(rows) * 7919, "indices": torch.arange(rows),
    }  # fmt: skip
    if filtered:
        counts = torch.randint(0, 3, (rows, vocab), dtype=torch.int32)
        penalties = Penalties(each(1.2, 1.0), each(0.5), each(0.1, 0.0, 0.3), counts, counts.roll(1, 0) > 1)
        filters = {"top_k": each(50, -1, 1000).int(), "top_p": each(0.9, 1.0, 0.3, 0.99), "min_p": each(0.0, 0.02)}
        args |= filters | {"penalties": penalties}
    return Case("sample", args, exact=True)


def token_rules(config: ModelConfig) -> Case:
    """Lines with 0 to 15 rules, some forbidding, some after a prefix of two tokens that occur everywhere; row 0 has
    none."""
    rows, most, vocab = 16, 15, config.vocab_size

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 2, shape, dtype=torch.int32)

    tokens = torch.stack([torch.randperm(vocab)[:most] for _ in range(rows)]).int()
    values = torch.randn(rows, most)
    values[:, ::3] = -torch.inf
    until = torch.randint(0, 40, (rows, most), dtype=torch.int32)
    start = torch.randint(0, 5, (rows, most), dtype=torch.int32)
    length = (start % 3).masked_fill(~values.isneginf(), 0)
    columns = torch.stack([tokens, values.view(torch.int32), until, start, length])
    table = {"counts": torch.arange(-1, rows - 1, dtype=torch.int32), "columns": columns, "prefixes": bits(rows, 8)}
    table["allowed"] = torch.randint(-(2**31), 2**31, (rows, (vocab + 31) // 32)).int()
    known = torch.randint(2, 30, (rows,), dtype=torch.int32)
    lines = {"rows": torch.randperm(rows).int(), "indices": known + bits(rows), "known": known, "path": bits(rows, 2)}
    args = {"logits": normal(rows, vocab, scale=3.0)} | table | {"history": bits(rows, 32)} | lines
    return Case("apply_token_rules", args, exact=True)


def greedy(config: ModelConfig) -> Case:
    return Case("greedy", {"logits": normal(30, config.vocab_size)}, exact=True)
