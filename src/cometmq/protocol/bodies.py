"""All JSON bodies by name, in one place to import from: `X.decode(body)` reads, `x.encode()` writes."""

from cometmq.protocol.bodies_admin import *  # noqa: F403
from cometmq.protocol.bodies_client import *  # noqa: F403
from cometmq.protocol.bodies_route import *  # noqa: F403
from cometmq.protocol.json_body import Body as Body
