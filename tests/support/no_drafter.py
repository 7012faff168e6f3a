"""A method of drafting that lacks its drafter: making its record fails."""

from hybridrt.speculative.method import DraftMethod


class Half(DraftMethod):
    pass


METHOD = Half()  # type: ignore[abstract]
