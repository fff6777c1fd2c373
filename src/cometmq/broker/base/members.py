"""The settings about the members of a raft group: `dLegerPeers`, `dLegerSelfId`, `preferredLeaderId`."""

from __future__ import annotations

import re
from typing import NamedTuple

from cometmq.errors import ConfigError
from cometmq.protocol.addresses import parse_address

_PEER = re.compile(r"([A-Za-z][A-Za-z0-9]{0,30})-(.+)").fullmatch
_NUMBERED = re.compile(r"[A-Za-z]+([0-9]{1,6})").fullmatch


class Peer(NamedTuple):
    """A member in `dLegerPeers`: its name and its address."""

    member: str
    addr: str


def peers_of(text: str) -> list[Peer]:
    """Parse `dLegerPeers`, such as `n0-host:port;n1-host:port`. Raises ConfigError if it is invalid."""
    peers = []
    for word in filter(None, (word.strip() for word in text.split(";"))):
        found = _PEER(word)
        if found is None or parse_address(found[2]) is None:
            raise ConfigError("dLegerPeers", word, "members like n0-host:port, several separated by ';'")
        peers.append(Peer(found[1], found[2]))
    if len({peer.member for peer in peers}) < len(peers):
        raise ConfigError("dLegerPeers", text, "members with different names")
    return peers


def broker_id_of(member: str) -> int:
    """Return a follower's `brokerId`: the number in its name, plus one. Raises ConfigError."""
    found = _NUMBERED(member)
    if found is None:
        raise ConfigError("dLegerSelfId", member, "letters and a number, like n0")
    return int(found[1]) + 1


def preferred_of(text: str) -> list[str]:
    """Return the names of the members in `preferredLeaderId`, where they are separated by `;`."""
    return list(filter(None, (word.strip() for word in text.split(";"))))


def check_member(member: str, peers: str, preferred: str) -> None:
    """Check dLegerSelfId, dLegerPeers and preferredLeaderId, which must name peers. Raises ConfigError."""
    broker_id_of(member)
    known = dict(peers_of(peers))
    if member not in known:
        raise ConfigError("dLegerPeers", peers, f"a list that contains this member, {member}")
    if not known.keys() >= set(preferred_of(preferred)):
        raise ConfigError("preferredLeaderId", preferred, "members of dLegerPeers, several separated by ';'")
