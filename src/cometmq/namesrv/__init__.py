"""The name server: route tables without I/O, the request handlers that use them, and the network server."""
