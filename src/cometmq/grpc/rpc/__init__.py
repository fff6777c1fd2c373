"""gRPC over HTTP/2, independent of sockets: messages, status codes, framing, calls."""
