"""The HTTP gateway: requests of curl and other HTTP clients, as calls of the gRPC service."""
