"""The prefix cache as users of `LLM` see it: reset, events, a dump, and sessions in files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from os import PathLike
from typing import Any

from hybridrt.base.config_json import check_fields, integer
from hybridrt.base.errors import SessionError
from hybridrt.base.files import as_path
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.turns import undisturbed
from hybridrt.engine.cache.cache_dump import write_dump
from hybridrt.engine.cache.session_file import Session
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.prompts import Prompt, text_or_ids
from hybridrt.engine.request.spans import cache_ids
from hybridrt.mem_cache.prefix_tree.cache_events import EVENTS, CacheSubscription


class PrefixCacheCalls(ABC):
    """The methods of `LLM` that are about its prefix cache."""

    @property
    @abstractmethod
    def engine(self) -> Engine: ...

    @abstractmethod
    def with_spans(self, prompts: Any, client: str = "") -> Any:
        """As `LLM.with_spans`."""

    def reset_prefix_cache(self) -> bool:
        with self.engine.turns:
            return self.engine.reset_prefix_cache()

    def cache_events(self, *, limit: int = EVENTS) -> CacheSubscription:
        """Subscribes to what the prefix cache and its main memory gain, lose and move. The first
        `read` begins with what they hold now, so the events say at every time what is cached.

        Args:
            limit: events that are kept until they are read. More push the oldest ones out
                (`CacheSubscription.missed`).

        Raises:
            ConfigError: `limit` is no integer from 1 to 2**31 - 1.
        """
        check_fields({"limit": limit}, {"limit": integer(1, 2**31 - 1)})
        with self.engine.turns:
            return self.engine.cache_events(limit)

    def dump_cache(self, path: str | PathLike[str], *, text: bool = False) -> None:
        """Writes the present contents of the prefix cache to a JSON file, for `hybridrt inspect
        --cache`.

        Args:
            text: also write the cached texts, if there is a tokenizer.

        Raises:
            RequestError: `path` is no path. OSError: the file cannot be written.
        """
        file = as_path("path", path)
        with self.engine.turns:
            dump = self.engine.cache_dump(text=text)
        write_dump(file, dump)

    def save_session(
        self, path: str | PathLike[str], prompt: Prompt, *, cache_salt: str | None = None, note: str = ""
    ) -> Session:
        """Writes KV and states of a text's longest cached prefix to a file, for `load_session`.

        Args:
            path: path of a safetensors file, which is replaced as a whole.
            prompt: most often prompt and answer of a request that has ended, best as token ids.
            cache_salt: the salt of that request.
            note: text of the caller's own, up to 2**20 characters.

        Returns:
            What was saved. Its `token_ids` may be fewer than the prompt's: the last token of an
                answer has no state.

        Raises:
            RequestError: `prompt` is no prompt, or `cache_salt` no text.
            SessionError: nothing of it is cached, `path` is no path, or the note is invalid.
            OSError: the file cannot be written.
        """
        given = self.with_spans(prompt)
        file = as_path("path", path, SessionError)
        content: Any = text_or_ids(given)
        if not isinstance(content, str):
            content = content[: self.engine.intake.limits.max_model_len - 1]  # the last token is never computed
        if isinstance(given, Mapping) and given.get("spans"):
            content = {**given, "prompt_token_ids": content}
        prepared = self.engine.prepare(content, SamplingParams(max_tokens=1, cache_salt=cache_salt))
        tokens = cache_ids(prepared.ids, prepared.spans)
        with undisturbed():
            return self.engine.sessions.save(file, tokens, self.engine.cache_key(prepared.params), note)

    def load_session(
        self, path: str | PathLike[str], *, cache_salt: str | None = None, trusted: bool = False
    ) -> Session:
        """Puts a file of `save_session` into the prefix cache. Requests with this `cache_salt` that
        begin with its tokens compute only the rest. Model, weights and dtypes must be those of the
        LLM that saved it; `tp_size`, `page_size`, drafting without prediction heads, and the device
        may differ.

        The numbers of a file are used as weights are: its writer decides what requests get. So a
        file that this user has not signed serves only requests with a salt of its own, the result's
        `cache_salt`.

        Args:
            cache_salt: None: none for a file that this user's `save_session` has written, else the
                file's own.
            trusted: treat the file as one that this user has written.

        Raises:
            SessionError: `path` is no path, the file is damaged or belongs to another model, or
                there is no room. Nothing has changed.
            RequestError: `cache_salt` is no text.
            OSError: the file cannot be opened.
        """
        key = self.engine.cache_key(SamplingParams(cache_salt=cache_salt))
        with undisturbed():
            return self.engine.sessions.load(as_path("path", path, SessionError), key, trusted)
