"""The decoder of HPACK's Huffman code (RFC 7541, appendix B).

The decoder reads a byte at a time. Its state is a node of the code's tree; for each state and byte a table
holds the next state and the decoded symbols. The tables are filled as they are used, because text uses a few
thousand of the 65,536 entries.
"""

from __future__ import annotations

from cometmq.grpc.http2.errors import ErrorCode, Http2Error

# The number of bits of each symbol's code; the last symbol ends a string. Codes of the same length are
# consecutive numbers in the order of their symbols, so that the lengths determine the codes.
_LENGTHS = (
    *(13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28),
    *(28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28),
    *(6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6),
    *(5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10),
    *(13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    *(7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6),
    *(15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5),
    *(6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28),
    *(20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23),
    *(24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24),
    *(22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23),
    *(21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23),
    *(26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25),
    *(19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27),
    *(20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23),
    *(26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26),
    30,
)
_END = 256
_MAX_PADDING_BITS = 7


class _State(dict[int, "tuple[_State, bytes]"]):
    """A node of the tree. As a dict, it maps the next byte to the next state and the decoded symbols."""

    __slots__ = ("children", "may_end")

    def __init__(self, may_end: bool) -> None:
        super().__init__()
        self.children: list[_State | int | None] = [None, None]
        self.may_end = may_end

    def __missing__(self, byte: int) -> tuple[_State, bytes]:
        state = self
        symbols = bytearray()
        for shift in range(7, -1, -1):
            child = state.children[byte >> shift & 1]
            if isinstance(child, _State):
                state = child
            elif child is None or child == _END:
                state = _FAILED
            else:
                symbols.append(child)
                state = _ROOT
        entry = self[byte] = state, bytes(symbols)
        return entry


def _tree() -> _State:
    root = _State(True)
    code = length = 0
    for symbol in sorted(range(_END + 1), key=lambda symbol: (_LENGTHS[symbol], symbol)):
        code <<= _LENGTHS[symbol] - length
        length = _LENGTHS[symbol]
        node = root
        for shift in range(length - 1, 0, -1):
            bit = code >> shift & 1
            child = node.children[bit]
            if not isinstance(child, _State):
                # A string may end within a code of at most 7 bits that are all 1.
                depth = length - shift
                child = _State(depth <= _MAX_PADDING_BITS and code >> shift == (1 << depth) - 1)
                node.children[bit] = child
            node = child
        node.children[code & 1] = symbol
        code += 1
    return root


_ROOT = _tree()
_FAILED = _State(False)


def decode(text: bytes) -> bytes:
    """Return the decoded form of a Huffman-coded string. Raises Http2Error if the code is invalid."""
    state = _ROOT
    parts: list[bytes] = []
    append = parts.append
    for byte in text:
        state, symbols = state[byte]
        append(symbols)
    if not state.may_end:
        raise Http2Error(ErrorCode.COMPRESSION_ERROR, "a Huffman-coded string is invalid")
    return b"".join(parts)
