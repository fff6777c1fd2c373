"""Leader election and log replication (Raft), without I/O.

A driver, called the shell, does the I/O for a node and reports events to it. The shell is part of the broker
or of a simulator.
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
