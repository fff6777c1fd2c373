"""The name server: route tables without I/O, the requests that use them, and the server around them."""
