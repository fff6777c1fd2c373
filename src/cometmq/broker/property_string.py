r"""Edits of a send's property string by slicing: no dict on the way of a message.

`name \x01 value \x02 name \x01 value …`, with or without a final \x02 (remoting.md 10.1). Of
duplicates the last wins.
"""

from __future__ import annotations

NAME_END = "\x01"
PAIR_END = "\x02"
EMPTY_VALUE = NAME_END + PAIR_END
WAIT = "WAIT\x01"
WAIT_INSIDE = "\x02WAIT\x01"


def value_of(properties: str, name: str) -> str | None:
    """The value of a property, None if it is absent or empty (Java's reader ignores empty ones)."""
    marker = PAIR_END + name + NAME_END
    found = properties.rfind(marker)
    if found >= 0:
        start = found + len(marker)
    elif properties.startswith(marker[1:]):
        start = len(marker) - 1
    else:
        return None
    end = properties.find(PAIR_END, start)
    value = properties[start:] if end < 0 else properties[start:end]
    return value or None


def drop(properties: str, name: str) -> str:
    """The string without a property, every occurrence of it."""
    prefix = name + NAME_END
    if prefix not in properties:
        return properties
    return PAIR_END.join(pair for pair in properties.split(PAIR_END) if not pair.startswith(prefix))


def _without_empty(properties: str) -> str:
    return PAIR_END.join(pair for pair in properties.split(PAIR_END) if pair.partition(NAME_END)[2])


def append(properties: str, pair: str) -> str:
    """The string with `pair` (name, \x01, value) at its end, with a separator if one is needed."""
    if not properties or properties.endswith(PAIR_END):
        return properties + pair
    return properties + PAIR_END + pair


def put(properties: str, name: str, value: str) -> str:
    """The string with this property and no other of its name."""
    return append(drop(properties, name), name + NAME_END + value)


def stored_form(properties: str | None, cluster_pair: str) -> tuple[str, bool]:
    """What 4.9 stores of a client's properties, and whether the sender wants to wait for flush and
    replication.

    WAIT is left out, CLUSTER comes last. `cluster_pair` is `CLUSTER`, \x01 and the cluster's name.
    """
    if not properties:
        return cluster_pair, True
    if EMPTY_VALUE in properties or properties[-1] == NAME_END:
        properties = _without_empty(properties)  # 4.9 passes all through a map that knows no empty values
        if not properties:
            return cluster_pair, True
    wait = True
    if WAIT in properties:
        start = properties.find(WAIT_INSIDE) + 1
        if start or properties.startswith(WAIT):
            stop = properties.find(PAIR_END, start)
            if stop < 0:
                wait = properties[start + 5 :].lower() != "false"
                properties = properties[: max(start - 1, 0)]
            else:
                wait = properties[start + 5 : stop].lower() != "false"
                properties = properties[:start] + properties[stop + 1 :]
            if not properties:
                return cluster_pair, wait
    if "CLUSTER\x01" in properties:
        properties = drop(properties, "CLUSTER")
        if not properties:
            return cluster_pair, wait
    if properties[-1] == PAIR_END:
        return properties + cluster_pair, wait
    return properties + PAIR_END + cluster_pair, wait
