"""The store's way to say no, in the protocol's words."""

from __future__ import annotations

from cometmq.errors import StoreError, Transient


class StoreRefused(StoreError, Transient):
    """Nothing was stored. `response_code` and `remark` are the answer to the client."""

    def __init__(self, response_code: int, remark: str) -> None:
        # BaseException.args are what pickle calls the class with.
        super().__init__(remark)
        self.args = (response_code, remark)
        self.response_code = response_code
        self.remark = remark

    def __str__(self) -> str:
        return f"[{self.response_code}] {self.remark}"
