"""A method of drafting that lacks its drafter: making its record fails."""

from hybridrt.runtime.run.drafting import DraftMethod


class Half(DraftMethod):
    pass


METHOD = Half()  # type: ignore[abstract]
