"""Responses that clients may ask for again, in memory, bounded in number and in bytes."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

from hybridrt.server.wire.errors import APIError

_ENTRY_BYTES = 512  # of an entry besides its texts
_ITEM_BYTES = 256  # of an item besides its text


@dataclass(frozen=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        head: JSON object of all its fields but `output`.
        output: the JSON text of each item of the answer, by its id.
        input: JSON text of a list: the items that the request itself brought.
        previous: the response that it continues.
    """

    head: bytes
    output: Mapping[str, bytes]
    input: bytes
    previous: str | None = None

    @property
    def body(self) -> bytes:
        """The response as JSON text."""
        return b'%b,"output":[%b]}' % (self.head[:-1], b",".join(self.output.values()))

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        texts = len(self.head) + len(self.input) + sum(map(len, self.output.values()))
        return texts + _ENTRY_BYTES + _ITEM_BYTES * len(self.output)


class ResponseStore:
    """Stores responses by owner and id. For a new one, the oldest ones of the owner that holds the
    most bytes make room. Any thread may call it.

    Args:
        most: responses; 0 stores none.
        most_bytes: bytes of all of them.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._owned: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}
        self._items: dict[tuple[str, str], bytes] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return sum(map(len, self._owned.values()))

    def put(self, owner: str, name: str, response: StoredResponse) -> bool:
        """False: it is larger than all that the store may hold."""
        if not self._most or response.size > self._most_bytes:
            return False
        with self._lock:
            self._drop(owner, name)
            while len(self) >= self._most or sum(self._bytes.values()) + response.size > self._most_bytes:
                largest = max(self._bytes, key=self._bytes.__getitem__)
                self._drop(largest, next(iter(self._owned[largest])))
            self._owned.setdefault(owner, OrderedDict())[name] = response
            self._bytes[owner] = self._bytes.get(owner, 0) + response.size
            self._items |= {(owner, item): text for item, text in response.output.items()}
        return True

    def get(self, owner: str, name: str) -> StoredResponse | None:
        """A response of this owner, which is then its youngest."""
        with self._lock:
            owned = self._owned.get(owner)
            if owned is None or name not in owned:
                return None
            owned.move_to_end(name)
            return owned[name]

    def delete(self, owner: str, name: str) -> bool:
        """False: there is none of this name."""
        with self._lock:
            return self._drop(owner, name)

    def item(self, owner: str, item: str) -> bytes | None:
        """The JSON text of an item of a stored answer."""
        return self._items.get((owner, item))

    def chain(self, owner: str, name: str, most_bytes: int) -> list[StoredResponse]:
        """A response and those that it continues, oldest first.

        Raises:
            APIError: one of them is not stored, or all together are too long for a request.
        """
        found, size = list[StoredResponse](), 0
        after: str | None = name
        while after is not None:
            stored = self.get(owner, after)
            if stored is None:
                text = f"there is no response {after!r}: it was not stored, or had to make room for others"
                raise APIError(400, text, "previous_response_id", "previous_response_not_found")
            found.append(stored)
            size += stored.size
            if size > most_bytes or len(found) > self._most:
                text = f"the responses before it have more than {most_bytes} bytes: begin a new conversation"
                raise APIError(400, text, "previous_response_id")
            after = stored.previous
        return found[::-1]

    def _drop(self, owner: str, name: str) -> bool:
        owned = self._owned.get(owner)
        dropped = None if owned is None else owned.pop(name, None)
        if owned is None or dropped is None:
            return False
        self._bytes[owner] -= dropped.size
        for item in dropped.output:
            self._items.pop((owner, item), None)
        if not owned:
            del self._owned[owner], self._bytes[owner]
        return True
