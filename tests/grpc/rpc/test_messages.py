"""The messages of gRPC clients: compared with those of the official Python client, and beside it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool
from tests.grpc.rpc.descriptors import described

from cometmq.grpc.rpc.enums import Code, MessageType
from cometmq.grpc.rpc.messages import PACKAGE, SERVICE, messages

RECORDED = Path(__file__).parents[2] / "data" / "grpc-descriptors-5.1.2.json"


def official() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(RECORDED.read_text("utf-8"))
    del recorded[SERVICE]
    return recorded


def ours() -> dict[str, Any]:
    return described([messages().Message.DESCRIPTOR.file])


def test_all_messages_and_enums_are_those_of_the_official_client_and_of_newer_ones() -> None:
    expected = official()
    expected[f"{PACKAGE}.Code"]["INVALID_CLIENT_PROPERTIES"] = 40021
    entry = f"{PACKAGE}.Settings.ClientPropertiesEntry"
    expected[f"{PACKAGE}.Settings"]["client_properties"] = [9, 11, f".{entry}", 3, "", False]
    expected[entry] = {"key": [1, 9, "", 1, "", False], "value": [2, 9, "", 1, "", False]}

    assert len(expected) > 70
    assert ours() == expected


def test_a_message_is_encoded_as_protobuf_defines_it() -> None:
    m = messages()
    properties = m.SystemProperties(keys=["k"], message_type=MessageType.FIFO, queue_offset=0)
    message = m.Message(topic=m.Resource(name="Orders"), user_properties={"a": "b"}, body=b"x")
    message.system_properties.CopyFrom(properties)

    encoded = message.SerializeToString()

    assert encoded == b'\n\x08\x12\x06Orders\x12\x06\n\x01a\x12\x01b\x1a\x07\x12\x01k0\x02p\x00"\x01x'
    assert m.Message.FromString(encoded) == message


def test_an_optional_field_with_its_default_value_is_present() -> None:
    properties = messages().SystemProperties

    assert properties(queue_offset=0).HasField("queue_offset")
    assert not properties().HasField("queue_offset")


def test_an_entry_of_a_oneof_replaces_the_other() -> None:
    m = messages()
    response = m.ReceiveMessageResponse(message=m.Message(body=b"x"))

    response.status.code = Code.MESSAGE_NOT_FOUND

    assert response.WhichOneof("content") == "status"


def test_a_process_can_have_the_official_messages_too() -> None:
    """The official client registers them in the default pool, which ours must not be in."""
    file = descriptor_pb2.FileDescriptorProto()
    messages().Message.DESCRIPTOR.file.CopyToProto(file)
    file.name = "definition.proto"

    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())

    theirs = descriptor_pool.Default().FindMessageTypeByName(f"{PACKAGE}.Message")
    assert theirs is not messages().Message.DESCRIPTOR


def test_protobuf_is_imported_at_the_first_use() -> None:
    program = "import sys, cometmq.grpc.rpc.messages; print('google.protobuf' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", program]) == b"False\n"
