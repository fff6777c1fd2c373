"""The HTTP gateway, which converts requests of HTTP clients such as curl to calls of the gRPC service."""
