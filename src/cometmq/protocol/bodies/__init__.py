"""The classes of all JSON bodies.

For a class `X`, `X.decode(body)` returns an instance, and the instance's method `encode` returns a body.
"""

from cometmq.protocol.bodies.admin import *  # noqa: F403
from cometmq.protocol.bodies.client import *  # noqa: F403
from cometmq.protocol.bodies.pop import *  # noqa: F403
from cometmq.protocol.bodies.route import *  # noqa: F403
from cometmq.protocol.json_body import Body as Body
