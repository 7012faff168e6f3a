"""Says of each request of a log why its reuse of the prefix cache ended, and what would help."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrt.engine.cache.request_log import LoggedCache, LoggedRequest, LostEntries
from hybridrt.engine.request.spans import KEY_BIT
from hybridrt.mem_cache.prefix_tree.prefix_cache import HELPS
from hybridrt.mem_cache.prefix_tree.texts import in_common

RESUMES = 16  # equal tokens after a difference that show that a text goes on
MOST_CHANGED = 64  # tokens that may stand where others were
COMPARED = 64  # latest earlier texts that are compared with a prompt that shares nothing with the cache
_TAG = re.compile(r"</?(think|thinking|reasoning|seed:think)>|\[/?THINK\]|<\|channel\|>", re.IGNORECASE)
_STATES = {"evicted": "state_evicted", "superseded": "state_superseded", "thinned": "state_thinned"}
WHY_HELPS: dict[str, str] = HELPS | {
    "off": "turn the prefix cache on (prefix_cache)",
    "too_short": "nothing: fewer tokens than a prompt leaves a state for",
    "prompt_logprobs": "leave prompt_logprobs out: a computed prefix gives none",
    "pooling": "pooling by the last token: a computed prefix has no mean",
    "prompt_changed": "put what changes, such as a date or an id, at the end of the prompt",
    "answer_changed": "send the answer back as it was",
    "part_removed": "send the whole answer back",
    "thinking_removed": "a chat template that keeps the thinking, or none of it in what is continued",
    "retokenised": "send token ids back: the same text has other tokens in a whole prompt than in an answer",
    "state_evicted": "more cache_slots, or all turns of a chat on one worker (sticky routing)",
    "state_superseded": "mark the place as a boundary; the state moved on with the conversation",
    "state_thinned": "mark the place as a boundary; an answer keeps few states within it",
    "reset": "nothing: the cache was reset in between",
    "dropped": "look at the model's numbers: an entry's use gave logits that are not finite",
    "running": "send it after the first one's prompt is computed; with target_itl_ms it waits by itself",
    "failed": "nothing: the earlier request has failed, and left nothing",
}


@dataclass(frozen=True)
class Explanation:
    """Why a request reused no more.

    Attributes:
        cached: tokens that it reused, of `prompt`.
        why: a cause of CacheMiss, or a more exact one (WHY_HELPS has all); "" if no more could be reused.
        token: number of the first token that the cause concerns; tokens: how many it has cost.
    """

    request_id: str
    prompt: int
    cached: int
    why: str
    token: int
    tokens: int

    @property
    def helps(self) -> str:
        return WHY_HELPS.get(self.why, "")


@dataclass(frozen=True)
class _Text:
    """Tokens of an earlier request, prompt first, and how many a prompt shares."""

    request: LoggedRequest
    tokens: np.ndarray
    shared: int


def explain(cache: LoggedCache, lines: Sequence[LoggedRequest | LostEntries]) -> Iterator[Explanation]:
    """An explanation of each request that was started, in the order of their ends."""
    requests = [line for line in lines if isinstance(line, LoggedRequest)]
    texts = [(each, np.array([*each.prompt, *each.answer], np.int64)) for each in requests]
    pieces = {token: text for each in requests for token, text in each.pieces.items()}
    for place, line in enumerate(lines):
        if isinstance(line, LoggedRequest) and line.admitted is not None:
            lost = [each for each in lines[:place] if isinstance(each, LostEntries) and each.key == line.key]
            yield _Case(cache, line, texts, lost, pieces).explanation()


class _Case:
    """One request, and what was there before it."""

    def __init__(
        self,
        cache: LoggedCache,
        line: LoggedRequest,
        texts: Sequence[tuple[LoggedRequest, np.ndarray]],
        lost: Sequence[LostEntries],
        pieces: dict[int, str],
    ) -> None:
        self._cache, self._line, self._lost, self._pieces = cache, line, lost, pieces
        self._prompt = np.array(line.prompt, np.int64)
        admitted = line.admitted or 0.0
        self._texts = [
            _Text(each, tokens, self._common(tokens)) for each, tokens in texts
            if each.key == line.key and each.admitted is not None and each.admitted < admitted
        ]  # fmt: skip

    def explanation(self) -> Explanation:
        why, token, tokens = self._cause()
        return Explanation(self._line.request_id, len(self._prompt), self._line.cached, why, token, tokens)

    def _cause(self) -> tuple[str, int, int]:
        line = self._line
        if not self._cache.keeps:
            return "off", 0, len(self._prompt) - 1
        if line.why is None:
            return "", line.cached, 0
        if line.why == "skipped":
            return line.skips or line.why, 0, len(self._prompt) - 1
        if line.why == "no_state":
            changed = self._changed()
            if changed is not None and changed[2] > line.tokens:
                return changed
            return self._without_state(), line.token, line.tokens
        if line.why == "evicted":
            return self._lost_by(line.token, "evicted"), line.token, line.tokens
        return self._by_text() if line.why in ("new", "changed") else (line.why, line.token, line.tokens)

    def _without_state(self) -> str:
        known = self._line.token + self._line.tokens
        if known < self._cache.grid:
            return "too_short"
        for lost in reversed(self._lost):
            shared = self._common(np.array(lost.tokens, np.int64))
            if any(self._line.cached < place <= min(shared, known) for place in lost.states):
                return _STATES.get(lost.why, lost.why)
        return "no_state"

    def _lost_by(self, token: int, otherwise: str) -> str:
        """Why the entries after a token of the prompt were lost."""
        gone = (lost for lost in reversed(self._lost) if self._common(np.array(lost.tokens, np.int64)) > token)
        return next((lost.why for lost in gone if lost.pages or lost.states), otherwise)

    def _by_text(self) -> tuple[str, int, int]:
        """The cause where the cache knows no text that goes on like the prompt."""
        line, best = self._line, self._nearest()
        if best is not None and best.shared > line.token and best.shared >= self._cache.grid:
            return self._not_kept(best), line.token, best.shared - line.token
        return self._changed() or (line.why or "", line.token, line.tokens)

    def _changed(self) -> tuple[str, int, int] | None:
        """What the prompt has changed of an earlier text."""
        best = self._nearest()
        candidates = [best] if best is not None and best.shared else self._texts[-COMPARED:]
        found = (self._difference(text) for text in candidates)
        return next((cause for cause in found if cause is not None), None)

    def _nearest(self) -> _Text | None:
        """The earlier text that shares the most."""
        return max(self._texts, key=lambda text: text.shared, default=None)

    def _not_kept(self, text: _Text) -> str:
        """Why the cache has not got a text that was there before."""
        assert self._line.admitted is not None
        if text.request.failed:
            return "failed"
        return "running" if text.request.ended > self._line.admitted else self._lost_by(self._line.token, "evicted")

    def _difference(self, text: _Text) -> tuple[str, int, int] | None:
        """Compares what follows the shared tokens. None: the texts have nothing more in common."""
        shared, prompt = text.shared, self._prompt
        ours, theirs = prompt[shared:], text.tokens[shared:]
        if not len(ours) or not len(theirs):
            return None
        if self._same_text(ours, theirs):
            return "retokenised", shared, min(len(theirs), len(ours))
        answers = shared >= len(text.request.prompt)
        if (places := _resumes(ours, theirs)) is None:
            return ("answer_changed", shared, min(len(theirs), len(ours))) if answers else None
        changed, left_out = places
        again = in_common(ours[changed:], theirs[left_out:])
        if changed or not answers:
            return "answer_changed" if answers else "prompt_changed", shared, again
        left = text.tokens[max(shared - 8, 0) : shared + left_out].tolist()
        tags = _TAG.search("".join(self._pieces.get(token, "") for token in left))
        return "thinking_removed" if tags else "part_removed", shared, again

    def _same_text(self, ours: np.ndarray, theirs: np.ndarray) -> bool:
        """Whether different tokens are the same text."""
        first, second = ([self._piece(token) for token in ids[:32].tolist()] for ids in (ours, theirs))
        most = max(len(first[0]), len(second[0]))
        return most > 0 and "".join(first)[:most] == "".join(second)[:most]

    def _piece(self, token: int) -> str:
        """The text of a token. A token of an image gets a text that no other one has."""
        return self._pieces.get(token, "") if token < KEY_BIT else f"<{token}>"

    def _common(self, tokens: np.ndarray) -> int:
        return in_common(tokens, self._prompt[:-1])


def _resumes(ours: np.ndarray, theirs: np.ndarray) -> tuple[int, int] | None:
    """After how many tokens of each both texts go on alike; None: nowhere."""
    held, size = theirs.tobytes(), theirs.itemsize
    for changed in range(min(MOST_CHANGED, max(len(ours) - RESUMES, 0)) + 1):
        probe = ours[changed : changed + RESUMES].tobytes()
        if len(probe) < RESUMES * size:
            return None
        place = held.find(probe)
        while place % size and place >= 0:
            place = held.find(probe, place + 1)
        if place >= 0:
            return changed, place // size
    return None
