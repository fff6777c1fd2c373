"""The gRPC endpoint for RocketMQ 5.x clients."""
