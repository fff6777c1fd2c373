"""Names of codes, versions and languages; what a topic or group may be called."""

from __future__ import annotations

import pytest

from cometmq.errors import MessageIllegal
from cometmq.protocol.codes import (
    LANGUAGES,
    check_group_name,
    check_topic_name,
    language_name,
    response_name,
    version_name,
)


def test_names_of_codes_and_versions() -> None:
    assert (response_name(22), response_name(9999)) == ("QUERY_NOT_FOUND", "RESPONSE_CODE_9999")
    numbers = [28, 213, 232, 253, 317, 399, 406, 407, 409, 413, 479, 513, 611, 612, 5000]
    assert [version_name(number) for number in numbers] == [
        "V3", "V4_0_0", "V4_1_0_SNAPSHOT", "V4_2_0", "V4_5_2", "V4_9_3", "V4_9_7_SNAPSHOT", "V4_9_7",
        "V4_9_8", "V5_0_0", "V5_3_3", "V5_5_0", "V5_9_9", "HIGHER_VERSION", "HIGHER_VERSION",
    ]  # fmt: skip


def test_names_of_languages() -> None:
    assert (LANGUAGES[3], LANGUAGES[9]) == ("PYTHON", "GO")
    assert (language_name(200), language_name(-1)) == ("OTHER", "OTHER")


@pytest.mark.parametrize("name", ["T", "%RETRY%group", "a|b-c_d", "x" * 127])
def test_good_names(name: str) -> None:
    check_topic_name(name)
    check_group_name(name)


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "a.b", "a\n", "x" * 256])
def test_bad_names(name: str) -> None:
    with pytest.raises(MessageIllegal, match="topic name"):
        check_topic_name(name)
    with pytest.raises(MessageIllegal, match="group name"):
        check_group_name(name)
