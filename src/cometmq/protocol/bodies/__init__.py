"""All JSON bodies by name. `X.decode(body)` reads a body, `x.encode()` writes one."""

from cometmq.protocol.bodies.admin import *  # noqa: F403
from cometmq.protocol.bodies.client import *  # noqa: F403
from cometmq.protocol.bodies.route import *  # noqa: F403
from cometmq.protocol.json_body import Body as Body
