"""Typed command headers: the ext fields of each request and response, named as Python names them.

Each class is one Java header class; the wire names are its field names. A field without default is one
without which no broker can do anything with the request; a missing optional field is None, whatever RocketMQ
declares mandatory (nothing is enforced there: docs/reference/remoting.md, Missing fields).
"""

from cometmq.protocol.ext import Header as Header
from cometmq.protocol.ext import decode_ext as decode_ext
from cometmq.protocol.ext import encode_ext as encode_ext
from cometmq.protocol.headers_admin import *  # noqa: F403
from cometmq.protocol.headers_client import *  # noqa: F403
from cometmq.protocol.headers_message import *  # noqa: F403
from cometmq.protocol.headers_namesrv import *  # noqa: F403
