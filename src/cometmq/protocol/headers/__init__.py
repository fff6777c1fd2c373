"""Typed command headers: the ext fields of each request and response, with Python names.

Each class corresponds to a class of RocketMQ's Java code. The names of the Java class's fields are the wire
names. A field is required, and so has no default, only if no broker can process the request without it. All
other fields may be None. These include fields that RocketMQ declares as mandatory, because RocketMQ accepts
requests without them (docs/reference/remoting.md, Missing fields).
"""

from cometmq.protocol.ext import Header as Header
from cometmq.protocol.ext import decode_ext as decode_ext
from cometmq.protocol.ext import encode_ext as encode_ext
from cometmq.protocol.headers.admin import *  # noqa: F403
from cometmq.protocol.headers.client import *  # noqa: F403
from cometmq.protocol.headers.message import *  # noqa: F403
from cometmq.protocol.headers.namesrv import *  # noqa: F403
from cometmq.protocol.headers.pop import *  # noqa: F403
