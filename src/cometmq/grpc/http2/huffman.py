"""The decoder of HPACK's Huffman code (RFC 7541, appendix B).

The decoder reads a byte at a time. Its state is a node of the code's tree; for each state and byte a table
holds the next state and the decoded symbols. The rows of the table are built at their first use, because text
uses only some of the states.
"""

from __future__ import annotations

from typing import TypeAlias

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


_Row: TypeAlias = "list[tuple[_Row, bytes]]"
"""For each value of the next byte, the next state's row and the decoded symbols. Empty until used."""


class _Node:
    """A node of the code's tree: a state of the decoder."""

    __slots__ = ("children", "may_end", "row")

    def __init__(self, may_end: bool) -> None:
        self.children: list[_Node | int | None] = [None, None]
        self.may_end = may_end
        self.row: _Row = []

    def next(self, byte: int) -> tuple[_Row, bytes]:
        node = self
        symbols = bytearray()
        for shift in range(7, -1, -1):
            child = node.children[byte >> shift & 1]
            if isinstance(child, _Node):
                node = child
            elif child is None or child == _END:
                node = _FAILED
            else:
                symbols.append(child)
                node = _ROOT
        return node.row, bytes(symbols)


def _tree() -> list[_Node]:
    """Return the nodes of the code's tree, its root first."""
    nodes = [_Node(True)]
    code = length = 0
    for symbol in sorted(range(_END + 1), key=lambda symbol: (_LENGTHS[symbol], symbol)):
        code <<= _LENGTHS[symbol] - length
        length = _LENGTHS[symbol]
        node = nodes[0]
        for shift in range(length - 1, 0, -1):
            bit = code >> shift & 1
            child = node.children[bit]
            if not isinstance(child, _Node):
                # A string may end within a code of at most 7 bits that are all 1.
                depth = length - shift
                child = _Node(depth <= _MAX_PADDING_BITS and code >> shift == (1 << depth) - 1)
                node.children[bit] = child
                nodes.append(child)
            node = child
        node.children[code & 1] = symbol
        code += 1
    return nodes


_TREE = _tree()
_ROOT = _TREE[0]
_FAILED = _Node(False)
_NODES = {id(node.row): node for node in (*_TREE, _FAILED)}


def decode(text: bytes) -> bytes:
    """Return the decoded form of a Huffman-coded string. Raises Http2Error if the code is invalid."""
    row = _ROOT.row
    parts: list[bytes] = []
    append = parts.append
    for byte in text:
        try:
            row, symbols = row[byte]
        except IndexError:
            node = _NODES[id(row)]
            row.extend([node.next(each) for each in range(256)])
            row, symbols = row[byte]
        append(symbols)
    if not _NODES[id(row)].may_end:
        raise Http2Error(ErrorCode.COMPRESSION_ERROR, "a Huffman-coded string is invalid")
    return b"".join(parts)
