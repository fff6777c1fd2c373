"""The log of a member of a raft group. Only brokers in such a group import this package."""

from cometmq.store.raft_log.member_files import (
    TermAndVote,
    has_forgotten,
    is_suspect,
    read_term,
    remove_suspect,
    write_term,
)
from cometmq.store.raft_log.raft_log import RaftLog

__all__ = [
    "RaftLog", "TermAndVote", "has_forgotten", "is_suspect", "read_term", "remove_suspect", "write_term",
]  # fmt: skip
