"""Sends and receives the frames of the package `protocol` with asyncio: connections, server, client."""

from cometmq.remoting.address_server import DEFAULT_DOMAIN, DEFAULT_SUB_GROUP, AddressServer
from cometmq.remoting.addresses import check_port, listen, port_error, resolve
from cometmq.remoting.calls import Waiter
from cometmq.remoting.client import RemotingClient, parse_addr
from cometmq.remoting.connection import Connection, Handler, Shortcut
from cometmq.remoting.dialing import dial
from cometmq.remoting.dispatch import Dispatcher
from cometmq.remoting.housekeeping import ConnectionTable
from cometmq.remoting.limits import Limits
from cometmq.remoting.loop import Run, end_of_input, loop_in_thread, new_event_loop, run, stop_accepting
from cometmq.remoting.memory import MakeProtocol, MemoryNetwork, network_of, serving
from cometmq.remoting.opening import Openings, feed
from cometmq.remoting.peer import describe_peer, host_of_peer
from cometmq.remoting.proxy_header import is_proxied, proxy_header
from cometmq.remoting.server import BACKLOG, RemotingServer
from cometmq.remoting.tick import Tick
from cometmq.remoting.tls import ServerTls, TlsFile, client_tls, server_tls

__all__ = [
    "BACKLOG", "DEFAULT_DOMAIN", "DEFAULT_SUB_GROUP", "AddressServer", "Connection", "ConnectionTable",
    "Dispatcher", "Handler", "Limits", "MakeProtocol", "MemoryNetwork", "Openings", "RemotingClient",
    "RemotingServer", "Run", "ServerTls", "Shortcut", "Tick", "TlsFile", "Waiter", "check_port", "client_tls",
    "describe_peer", "dial", "end_of_input", "feed", "host_of_peer", "is_proxied", "listen", "loop_in_thread",
    "network_of", "new_event_loop", "parse_addr", "port_error", "proxy_header", "resolve", "run",
    "server_tls", "serving", "stop_accepting",
]  # fmt: skip
