"""All classes of JSON bodies. `X.decode(body)` reads a body of class X, `x.encode()` writes one."""

from cometmq.protocol.bodies.admin import *  # noqa: F403
from cometmq.protocol.bodies.client import *  # noqa: F403
from cometmq.protocol.bodies.pop import *  # noqa: F403
from cometmq.protocol.bodies.route import *  # noqa: F403
from cometmq.protocol.json_body import Body as Body
