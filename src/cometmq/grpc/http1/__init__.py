"""The server side of HTTP/1.1, without I/O."""
