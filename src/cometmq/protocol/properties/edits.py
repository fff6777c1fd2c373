r"""Edits of a send's property string by slicing: no dict on the way of a message.

`name \x01 value \x02 name \x01 value …`, with or without a final \x02
(docs/reference/remoting.md, Property string). Of duplicates the last wins.
"""

from __future__ import annotations

from cometmq.errors import CommandError
from cometmq.protocol.codes import ResponseCode
from cometmq.protocol.properties.keys import index_keys
from cometmq.protocol.properties.text import PROPERTIES_MAX_BYTES, has_stray_separator, tags_code

NAME_END = "\x01"
PAIR_END = "\x02"
UNIQUE = "UNIQ_KEY\x01"
UNIQUE_NAME = len(UNIQUE)
FORMS_LIMIT = 2_048
FORMS_SKIPPED = 100_000
TAG_CACHE_LIMIT = 65_536
# Characters of what is remembered: 12 MB of forms and 16 MB of tags at most. What is longer is worked out
# anew.
LONGEST_FORM = 2_048
LONGEST_TAG = 128
EMPTY_VALUE = NAME_END + PAIR_END
WAIT = "WAIT\x01"
WAIT_INSIDE = "\x02WAIT\x01"


def value_of(properties: str, name: str) -> str | None:
    """The value of a property, None if it is absent (Java's reader takes no notice of empty ones)."""
    marker = PAIR_END + name + NAME_END
    stop = len(properties)
    while (found := properties.rfind(marker, 0, stop)) >= 0 or properties.startswith(marker[1:]):
        start = found + len(marker)
        end = properties.find(PAIR_END, start)
        value = properties[start:] if end < 0 else properties[start:end]
        if value or found < 0:
            return value or None
        stop = found + 1  # the separator may end the pair before
    return None


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


def check_length(properties: str | None) -> None:
    """Refuse properties that no record holds, before anything of them is hashed or remembered."""
    if properties and len(properties) > PROPERTIES_MAX_BYTES:
        raise CommandError(
            ResponseCode.MESSAGE_ILLEGAL,
            "the message is illegal, maybe msg body or properties length not matched. msg properties length "
            f"limit {PROPERTIES_MAX_BYTES}B, these have {len(properties)} characters",
        )


def stray_separator() -> CommandError:
    """The refusal of properties that nobody could read as they were meant."""
    return CommandError(
        ResponseCode.MESSAGE_ILLEGAL, "a name or value of the properties holds a separator (0x01 or 0x02)"
    )


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


def tag_of(properties: str) -> str | None:
    """The TAGS of a stored property string, which has CLUSTER behind it."""
    at = properties.rfind("TAGS\x01")
    if at < 0:
        return None
    if at and properties[at - 1] != PAIR_END:
        return value_of(properties, "TAGS")  # a user's property whose name ends so
    return properties[at + 5 : properties.find(PAIR_END, at)] or None


# What is stored of a property string as UTF-8, its tags code, whether the sender waits, whether it is a plain
# message (one without a delay and no transaction), and its unique key if that is known to be its only key.
StoredForm = tuple[bytes, int, bool, bool, "bytes | None"]


class StoredForms:
    """Stored forms of property strings, remembered by all of the string but the value of its unique key.

    Messages of one sender differ in little else, and then two cuts and a look-up (0.4 µs) stand for all that
    `stored_form` and `tag_of` do (1.3 µs). Senders who give each message other properties would fill the
    memory for nothing: when it is full and has not served, it is left alone for a while.
    """

    __slots__ = ("_cluster_pair", "_forms", "_served", "_skip", "_tag_codes")

    def __init__(self, cluster_pair: str) -> None:
        self._cluster_pair = cluster_pair
        self._forms: dict[str, tuple[bytes, bytes, int, bool, bool, bool]] = {}
        self._tag_codes: dict[str, int] = {}
        self._served = 0
        self._skip = 0

    def of(self, properties: str | None) -> StoredForm:
        """The stored form of a client's property string."""
        if not properties or self._skip or len(properties) > LONGEST_FORM:
            return self.derive(properties)
        at = properties.rfind(UNIQUE) + UNIQUE_NAME
        end = properties.find(PAIR_END, at)
        if end < 0:
            end = len(properties)
        value = properties[at:end]
        if at < UNIQUE_NAME or not value or NAME_END in value:
            return self.derive(properties)
        known = self._forms.get(properties[:at] + properties[end:])
        if known is None:
            return self._learn(properties, at, end)
        before, behind, code, wait, plain, alone = known
        self._served += 1
        unique = value.encode()
        return before + unique + behind, code, wait, plain, unique if alone else None

    def derive(self, properties: str | None) -> StoredForm:
        """The same without the help of memory. Raises CommandError for a string that cannot be stored."""
        if self._skip:
            self._skip -= 1
        check_length(properties)
        text, wait = stored_form(properties, self._cluster_pair)
        stored = text.encode()
        if has_stray_separator(stored):
            raise stray_separator()
        tag = tag_of(text)
        plain = "DELAY\x01" not in text and "TRAN_MSG\x01" not in text
        return stored, 0 if tag is None else self._tag_code(tag), wait, plain, None

    def _learn(self, properties: str, at: int, end: int) -> StoredForm:
        form = self.derive(properties)
        name_at = at - UNIQUE_NAME
        if name_at and properties[name_at - 1] != PAIR_END:
            return form  # a name that only ends in UNIQ_KEY
        if len(self._forms) >= FORMS_LIMIT:
            self._skip = 0 if self._served > FORMS_LIMIT else FORMS_SKIPPED
            self._served = 0
            self._forms.clear()
        stored, code, wait, plain, _ = form
        before, _, behind = stored.rpartition(properties[name_at:end].encode())
        alone = index_keys(stored) == [properties[at:end].encode()]
        kept = properties[:at] + properties[end:]
        self._forms[kept] = (before + UNIQUE.encode(), behind, code, wait, plain, alone)
        return form

    def _tag_code(self, tag: str) -> int:
        code = self._tag_codes.get(tag)
        if code is None:
            if len(tag) > LONGEST_TAG:
                return tags_code(tag)
            if len(self._tag_codes) >= TAG_CACHE_LIMIT:
                self._tag_codes.clear()
            code = self._tag_codes[tag] = tags_code(tag)
        return code
