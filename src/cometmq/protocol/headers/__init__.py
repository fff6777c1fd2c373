"""Typed command headers: the ext fields of each request and response, with Python names.

Each class corresponds to one Java header class; the wire names are its field names. Only fields without which
no broker can process the request have no default. A missing optional field is None, whatever RocketMQ
declares as mandatory, because it does not enforce that (docs/reference/remoting.md, Missing fields).
"""

from cometmq.protocol.ext import Header as Header
from cometmq.protocol.ext import decode_ext as decode_ext
from cometmq.protocol.ext import encode_ext as encode_ext
from cometmq.protocol.headers.admin import *  # noqa: F403
from cometmq.protocol.headers.client import *  # noqa: F403
from cometmq.protocol.headers.message import *  # noqa: F403
from cometmq.protocol.headers.namesrv import *  # noqa: F403
