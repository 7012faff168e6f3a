"""Copies prefixes from the prefix cache to main memory and files, and back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrt.base.errors import ConfigError, SessionError
from hybridrt.base.turns import Change, Turns
from hybridrt.engine.cache.adoption import adopt, take_room
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.cache.session_file import MAX_TENSORS, CachedPrefix, Session, SessionReader, write_session
from hybridrt.engine.cache.session_key import session_key
from hybridrt.engine.request.spans import with_placeholders
from hybridrt.mem_cache.pools.mamba_pool_spec import Shapes
from hybridrt.mem_cache.pools.page_groups import GroupPages, PageSets, no_sets, pages_of
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.state_identity import Identity, state_identity
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.prefix_copy import PrefixPlaces, Tensors, prefix_shapes
from hybridrt.runtime.run.prefix_cut import PrefixCut
from hybridrt.runtime.step.plan import Executor, StepPlan


class Sessions:
    """Saves and loads cached prefixes of an engine.

    Any thread may call `save` and `load`: they take a turn at the engine only for copies between
    device and main memory, not for the files.

    Args:
        settle: launches the sampling of the last step if it waits for masks, so that another step
            can be launched.
    """

    def __init__(
        self, executor: Executor, pools: CacheCoordinator, turns: Turns, change: Change, settle: Callable[[], None]
    ) -> None:
        self._executor, self._pools, self._turns, self._change = executor, pools, turns, change
        self._settle = settle
        self._identity: Identity | None = None

    def save(self, path: Path, tokens: np.ndarray, key: CacheKey, note: str) -> Session:
        """Writes the longest cached prefix of a text [n] (`cache_ids`) with this key.

        Raises:
            SessionError: nothing of it is cached, or the note is no text or too long. There is no
                file then.
            OSError: the file cannot be written.
        """
        identity = self._identify(key)
        with self._turns:
            prefix = self._read(tokens, key)
        write_session(path, prefix, identity, note, session_key(), self._runner().target.tp.size)
        return Session(with_placeholders(prefix.tokens, self._runner().model_config), note, key.salt)

    def load(self, path: Path, key: CacheKey, trusted: bool) -> Session:
        """Puts a file of `save`, of this or another process, into the prefix cache.

        Args:
            key: of the requests that it serves. All but the salt must be that of the file. An empty
                salt becomes one of the file's own, unless this user has signed the file.
            trusted: treat the file as signed by this user.

        Raises:
            SessionError: the file cannot be used, or the pools have no room for it. Nothing has
                changed.
            OSError: there is no such file, or it cannot be opened.
        """
        runner, identity = self._runner(), self._identify(key)
        with SessionReader(path, identity) as reader:
            with self._turns:  # checked before memory is allocated for the contents
                length = self._room(reader.num_tokens, reader.num_states)[0]
            ranks = runner.target.tp.size
            cut = PrefixCut(runner.model_config, ranks)
            shapes = prefix_shapes(runner.pools, ranks, length, reader.num_states)
            prefix, note = reader.read(_shapes_of(reader, cut, shapes), runner.model_config.vocab_size)
            prefix = replace(prefix, tensors=cut.recut(prefix.tensors))
            if not (key.salt or trusted or reader.signed_with(session_key())):
                key = key._replace(salt=reader.own_salt)
        with self._turns:
            self._write(prefix, key)
        return Session(with_placeholders(prefix.tokens, runner.model_config), note, key.salt)

    def _runner(self) -> ModelRunner:
        executor = self._executor
        runner = executor.runner if isinstance(executor, TensorParallelExecutor) else executor
        if not isinstance(runner, ModelRunner):
            raise SessionError(
                f"the states of a {type(runner).__name__} cannot be copied: sessions need an engine over a ModelRunner"
            )
        return runner

    @property
    def _copier(self) -> Any:
        return self._executor

    def _identify(self, key: CacheKey) -> Identity:
        """What must be equal in a file. The first call reads a part of every weight."""
        if self._identity is None:
            runner = self._runner()
            cut = PrefixCut(runner.model_config, 1)
            layers = {
                i: [[*cut.widths(f"layers.{i}.keys", 1), *t.shape[3:]] for t in runner.pools.kv.layer_tensors(i)]
                for i in runner.pools.kv.specs
            }
            scales = runner.pools.kv.scales
            self._identity = state_identity(runner.config, runner.target, runner.model_path, scales) | {
                "kv_layers": ", ".join(f"{i}: {shapes}" for i, shapes in layers.items()),
            }
            if any(window is not None for window in runner.pools.kv.windows):
                # A file has the windows' tokens from the start of a page on.
                windows = {i: spec.sliding_window for i, spec in runner.pools.kv.specs.items()}
                self._identity |= {"windows": str(windows), "page_size": runner.pools.kv.page_size}
        return self._identity | key.other_than_salt()

    def _read(self, tokens: np.ndarray, key: CacheKey) -> CachedPrefix:
        store = self._pools.prefixes
        match, states = store.path(tokens, key)
        if not match.length:
            raise SessionError(
                f"nothing of these {len(tokens)} tokens is in the prefix cache: save what a request has just computed, "
                "with the cache_salt that it had"
            )
        self._flush()
        sets = match.pages if match.tail is None else np.concatenate((match.pages, match.tail))
        pages = [held.indices.tolist() for held in pages_of(sets)]
        most = 1 if self._pools.pages.has_windows else self._most_states(match.length)
        states = states[-most:]  # no earlier one has its windows here
        copied = [(position, slot.index) for position, slot in states]
        tensors = self._copier.read_prefix(PrefixPlaces(match.length, pages, copied))
        known = tokens[: store.known_at(match.length)].copy()
        return CachedPrefix(known, [position for position, _ in states], tensors)

    def _most_states(self, length: int) -> int:
        names = prefix_shapes(self._runner().pools, 1, length, 1)
        of_state = sum(name.startswith("states.") for name in names)
        return max((MAX_TENSORS - len(names)) // max(of_state, 1), 1)

    def _flush(self) -> None:
        """Launches pending donations, clears slabs and waits for the tier's copies, as the next step
        would. Then no slot of the cache lacks tokens of a ring, and no copy reads a page that may be
        written.
        """
        plan, tier = StepPlan(), self._pools.prefixes.tier
        if tier is not None:
            tier.wait_for(tier.last_ticket)
        self._pools.seal(plan)
        if plan.moves or plan.after_copies or plan.cleared:
            self._settle()
            self._executor.launch(plan)
            self._pools.launched(plan)

    def _room(self, num_tokens: int, num_states: int) -> tuple[int, list[int], int]:
        """Tokens with KV, their pages in each group, and how many of its states fit, for a prefix
        of so many tokens. SessionError without room."""
        pools, store = self._pools, self._pools.prefixes
        if not store.keeps:
            raise SessionError("this LLM keeps no prefixes: build it with prefix_cache=True")
        length = store.length_of(num_tokens)
        if length <= 0 or (store.tree.recurrent and not num_states):
            raise SessionError(f"{num_tokens} tokens and {num_states} states are no prefix of this model")
        free_pages, free_states = store.room()
        pages = [demand.whole(length) - demand.first_page(length) for demand in pools.pages.demands]
        for need, free, group in zip(pages, free_pages, pools.pages.groups):
            if need > free:
                raise SessionError(
                    f"the session needs {need} KV pages, and running requests leave {free} of {group.total}: "
                    "load it when fewer run, or raise memory_fraction"
                )
        if num_states and not free_states:
            raise SessionError("the session needs a state slot, and running requests hold all of them: load it later")
        least = min(num_states, 1)
        for count in range(min(num_states, free_states), least - 1, -1):
            if store.has_room(pages, count):
                return length, pages, count
        raise SessionError(
            f"the session needs {pages} KV pages and {least} state slots together, more than running requests leave: "
            "load it when fewer run, or raise memory_fraction"
        )

    def _write(self, prefix: CachedPrefix, key: CacheKey) -> None:
        """Copies a prefix into the pools and gives it to the cache. Keeps the last states that have
        room."""
        store = self._pools.prefixes
        length, num_pages, num_states = self._room(len(prefix.tokens), len(prefix.positions))
        skipped = len(prefix.positions) - num_states
        self._flush()
        taken = take_room(store, num_pages, num_states)
        if taken is None:
            raise SessionError("too few pages of the prefix cache can be evicted for the session now: load it later")
        with self._change:
            self._flush()  # the pages may be in slabs to clear
            pages, slots = taken
            states = dict(zip(prefix.positions[skipped:], slots, strict=True))
            copied = [(position, slot.index) for position, slot in states.items()]
            places = PrefixPlaces(length, [held.indices.tolist() for held in pages], copied)
            self._copier.write_prefix(places, _without_states(prefix.tensors, skipped))
            sets = self._sets(length, pages)
            adopt(store, prefix.tokens, sets, pages, states, key, "loaded")
            if store.tier is not None:
                store.tier.offer(prefix.tokens, sets, states, key)

    def _sets(self, length: int, pages: GroupPages) -> PageSets:
        """The page sets of `length` tokens, of which `pages` are the last ones."""
        demands = self._pools.pages.demands
        sets = no_sets(len(demands), demands[0].whole(length) if demands else 0)
        for column, held in zip(sets.T, pages):
            column[len(column) - len(held) :] = held.keys
        return sets


def _shapes_of(reader: SessionReader, cut: PrefixCut, shapes: Shapes) -> Shapes:
    """Shapes of the tensors of a file, which any number of ranks may have written."""
    try:
        return cut.shapes(shapes, reader.num_ranks)
    except ConfigError as e:
        raise SessionError(f"the file was not written by {reader.num_ranks} ranks of this model: {e}") from e


def _without_states(tensors: Tensors, skipped: int) -> Tensors:
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        what, _, rest = name.partition(".")
        if what == "states":
            number, _, part = rest.partition(".")
            if int(number) < skipped:
                continue
            name = f"states.{int(number) - skipped}.{part}"
        found[name] = tensor
    return found
