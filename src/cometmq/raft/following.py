"""What a follower does with the entries that a leader hands over."""

from __future__ import annotations

from cometmq.errors import RaftMessageError
from cometmq.raft.account import LogAccount
from cometmq.raft.messages import NO_TERM, Append, AppendRequest, LogChange, Reset, Truncate


class Following:
    """A follower's log beside its leader's. agreed: up to here they are known to be the same, durable or
    not."""

    def __init__(self, account: LogAccount) -> None:
        self._account = account
        self.agreed = account.commit

    def check(self, request: AppendRequest) -> None:
        """Refuse what contradicts committed entries: RaftMessageError. No leader of the group says so."""
        account, prev = self._account, request.prev_index
        if NO_TERM != request.prev_term != account.term_of(prev) != NO_TERM and prev <= account.commit:
            raise RaftMessageError("prev_term", request.prev_term, f"entry {prev} is committed with another")
        first, last = max(prev + 1, account.first), min(prev + request.count, account.commit)
        unlike = account.first_unlike(first, last, request.entries_term)
        if unlike is not None:
            problem = f"entry {unlike} is committed with another"
            raise RaftMessageError("entries_term", request.entries_term, problem)

    def take(self, request: AppendRequest) -> list[LogChange] | None:
        """What to change, so that the log has the request's entries; None if it does not join them."""
        account, prev = self._account, request.prev_index
        if prev <= account.commit or NO_TERM != account.term_of(prev) == request.prev_term:
            return self._replace([], request)
        if request.prev_term != NO_TERM or not request.count:
            return None  # where the leader's log begins, its first entry is needed to compare
        if account.term_of(prev + 1) == request.entries_term:
            return self._replace([], request)
        account.reset(request)
        self.agreed = prev
        return self._replace([Reset(account.first)], request)

    def _replace(self, changes: list[LogChange], request: AppendRequest) -> list[LogChange]:
        account = self._account
        start, end = request.prev_index + 1, request.prev_index + request.count
        unlike = account.first_unlike(
            max(start, account.commit + 1), min(end, account.last), request.entries_term
        )
        if unlike is not None:
            changes.append(Truncate(unlike))
            self.cut(unlike)
        first = account.last + 1
        if end >= first:
            count = end - first + 1
            account.append(count, request.entries_term)
            for entry in request.members:
                if entry.index >= first:
                    account.history.add(entry)
            changes.append(Append(first, count, request.entries_term, first - start, request.payload))
        self.agreed = max(self.agreed, end)
        account.commit = max(account.commit, min(request.commit, end))
        return changes

    def cut(self, first: int) -> None:
        self._account.cut(first)
        self.agreed = min(self.agreed, first - 1)
