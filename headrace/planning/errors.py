"""Which errors does planning itself raise?"""

from headrace.errors import BudgetError


class BudgetTooSmall(BudgetError):  # noqa: N818 - the name says what is wrong; BudgetError is its family
    """A visit cannot be served within the budget: its blocks and the residents together are larger.

    Attributes are bytes: `needed_bytes` (blocks of the visit plus residents), `budget_bytes`; `visit` is its index.
    """

    def __init__(
        self, *, visit: int, blocks: tuple[int, ...], needed_bytes: int, resident_bytes: int, budget_bytes: int
    ):
        self.visit = visit
        self.blocks = blocks
        self.needed_bytes = needed_bytes
        self.resident_bytes = resident_bytes
        self.budget_bytes = budget_bytes
        super().__init__(
            f"visit {visit} needs blocks {list(blocks)}: {needed_bytes:,} bytes on the device together with "
            f"{resident_bytes:,} bytes of residents, but the budget is {budget_bytes:,} bytes; raise the budget to at "
            f"least {needed_bytes:,} bytes, keep fewer blocks resident, or cut the model into smaller blocks"
        )
