"""The enums of `apache.rocketmq.v2`, the API of 5.x clients (apache/rocketmq-apis, version 2.1.2).

`messages.py` derives the enums of the messages from these classes. The members of all but `Code` are numbered
from 0 in their order.
"""

from __future__ import annotations

from enum import IntEnum

TransactionResolution = IntEnum(
    "TransactionResolution", "TRANSACTION_RESOLUTION_UNSPECIFIED COMMIT ROLLBACK", start=0
)
"""The decision that ends a transaction."""
TransactionSource = IntEnum(
    "TransactionSource", "SOURCE_UNSPECIFIED SOURCE_CLIENT SOURCE_SERVER_CHECK", start=0
)
"""The cause of an EndTransaction request: the producer itself, or a check by the server."""
Permission = IntEnum("Permission", "PERMISSION_UNSPECIFIED NONE READ WRITE READ_WRITE", start=0)
"""What a client may do with a message queue."""
FilterType = IntEnum("FilterType", "FILTER_TYPE_UNSPECIFIED TAG SQL", start=0)
"""The language of a filter expression."""
AddressScheme = IntEnum("AddressScheme", "ADDRESS_SCHEME_UNSPECIFIED IPv4 IPv6 DOMAIN_NAME", start=0)
"""The kind of the addresses of an endpoint."""
MessageType = IntEnum(
    "MessageType", "MESSAGE_TYPE_UNSPECIFIED NORMAL FIFO DELAY TRANSACTION LITE PRIORITY", start=0
)
"""The type of a message; a topic accepts some of them."""
DigestType = IntEnum("DigestType", "DIGEST_TYPE_UNSPECIFIED CRC32 MD5 SHA1", start=0)
"""The algorithm of a body's checksum."""
ClientType = IntEnum(
    "ClientType",
    "CLIENT_TYPE_UNSPECIFIED PRODUCER PUSH_CONSUMER SIMPLE_CONSUMER PULL_CONSUMER LITE_PUSH_CONSUMER "
    "LITE_SIMPLE_CONSUMER",
    start=0,
)
"""The kind of a client."""
Encoding = IntEnum("Encoding", "ENCODING_UNSPECIFIED IDENTITY GZIP", start=0)
"""The compression of a message body."""
Language = IntEnum(
    "Language",
    "LANGUAGE_UNSPECIFIED JAVA CPP DOT_NET GOLANG RUST PYTHON PHP NODE_JS RUBY OBJECTIVE_C DART KOTLIN",
    start=0,
)
"""The programming language of a client."""
LiteSubscriptionAction = IntEnum(
    "LiteSubscriptionAction", "PARTIAL_ADD PARTIAL_REMOVE COMPLETE_ADD COMPLETE_REMOVE", start=0
)
"""The change that a SyncLiteSubscription request makes."""
QueryOffsetPolicy = IntEnum("QueryOffsetPolicy", "BEGINNING END TIMESTAMP", start=0)
"""The offset that a QueryOffset request asks for."""
Policy = IntEnum("Policy", "LAST MIN MAX", start=0)
"""The start of a subscription to a lite topic; nested in the message `OffsetOption`."""


class Code(IntEnum):
    """The code of a `Status`, the outcome of a request or of one entry of it."""

    CODE_UNSPECIFIED = 0
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    INVALID_CLIENT_PROPERTIES = 40021  # exists since a version of the API after 2.1.2
    UNAUTHORIZED = 40100
    PAYMENT_REQUIRED = 40200
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800
    PAYLOAD_TOO_LARGE = 41300
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    REQUEST_HEADER_FIELDS_TOO_LARGE = 43100
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_ERROR = 50000
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    VERIFY_FIFO_MESSAGE_UNSUPPORTED = 50502
    FAILED_TO_CONSUME_MESSAGE = 60000
