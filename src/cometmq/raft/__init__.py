"""Leader election and log replication (Raft), without I/O.

The caller of a node, a broker or a simulator, does the I/O and reports events to the node.
"""

from cometmq.raft.members import Members, MembersEntry
from cometmq.raft.messages import (
    AnyMessage,
    Append,
    AppendOwn,
    AppendRequest,
    AppendResponse,
    Effects,
    HardState,
    LogChange,
    LogView,
    Proposed,
    RaftOptions,
    Reset,
    Role,
    RoleChange,
    TransferRequest,
    Truncate,
    VoteRequest,
    VoteResponse,
)
from cometmq.raft.node import RaftNode

__all__ = [
    "AnyMessage", "Append", "AppendOwn", "AppendRequest", "AppendResponse", "Effects", "HardState",
    "LogChange", "LogView", "Members", "MembersEntry", "Proposed", "RaftNode", "RaftOptions", "Reset", "Role",
    "RoleChange", "TransferRequest", "Truncate", "VoteRequest", "VoteResponse",
]  # fmt: skip
