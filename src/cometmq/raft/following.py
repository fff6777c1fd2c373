"""The follower's side of log replication: it applies the leader's entries to the log."""

from __future__ import annotations

from cometmq.errors import RaftMessageError
from cometmq.raft.log_state import LogState
from cometmq.raft.messages import NO_TERM, Append, AppendRequest, LogChange, Reset, Truncate


class Following:
    """Applies a leader's entries to a follower's log, and tracks how far both logs are equal.

    Attributes:
        agreed: The last entry up to which both logs are known to be equal, durable or not.
    """

    def __init__(self, log_state: LogState) -> None:
        self._log_state = log_state
        self.agreed = log_state.commit

    def check_request(self, request: AppendRequest) -> None:
        """Refuse a request that contradicts committed entries. A correct leader never sends one.

        Raises:
            RaftMessageError: The term of an entry in the request differs from the term of the committed entry
                with the same index.
        """
        log_state, prev = self._log_state, request.prev_index
        if NO_TERM != request.prev_term != log_state.term_of(prev) != NO_TERM and prev <= log_state.commit:
            raise RaftMessageError("prev_term", request.prev_term, f"entry {prev} is committed with another")
        first, last = max(prev + 1, log_state.first), min(prev + request.count, log_state.commit)
        mismatch = log_state.first_mismatch(first, last, request.entries_term)
        if mismatch is not None:
            problem = f"entry {mismatch} is committed with another"
            raise RaftMessageError("entries_term", request.entries_term, problem)

    def apply(self, request: AppendRequest) -> list[LogChange] | None:
        """Add a request's entries to the log state, and return the changes that the caller must write.

        Returns:
            The changes in order, or None if this log does not hold the entry before the request's first one.
        """
        log_state, prev = self._log_state, request.prev_index
        if prev <= log_state.commit or NO_TERM != log_state.term_of(prev) == request.prev_term:
            return self._replace([], request)
        if request.prev_term != NO_TERM or not request.count:
            return None  # The logs cannot be compared at this entry, so the leader must send an earlier one
        if log_state.term_of(prev + 1) == request.entries_term:
            return self._replace([], request)
        log_state.reset(request)
        self.agreed = prev
        return self._replace([Reset(log_state.first)], request)

    def _replace(self, changes: list[LogChange], request: AppendRequest) -> list[LogChange]:
        log_state = self._log_state
        start, end = request.prev_index + 1, request.prev_index + request.count
        mismatch = log_state.first_mismatch(
            max(start, log_state.commit + 1), min(end, log_state.last), request.entries_term
        )
        if mismatch is not None:
            changes.append(Truncate(mismatch))
            self.cut(mismatch)
        first = log_state.last + 1
        if end >= first:
            count = end - first + 1
            log_state.append(count, request.entries_term)
            for entry in request.members:
                if entry.index >= first:
                    log_state.history.add(entry)
            changes.append(Append(first, count, request.entries_term, first - start, request.payload))
        self.agreed = max(self.agreed, end)
        log_state.commit = max(log_state.commit, min(request.commit, end))
        return changes

    def cut(self, first: int) -> None:
        self._log_state.cut(first)
        self.agreed = min(self.agreed, first - 1)
