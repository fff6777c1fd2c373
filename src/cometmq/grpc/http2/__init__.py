"""The server side of HTTP/2 (RFC 9113, RFC 7541) as a state machine without sockets and clocks."""
